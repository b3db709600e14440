"""How tensors travel between the ranks of a `Group`: in any layout and dtype, by the group's ranks.

Never knows what an operator is; ``transfer`` moves contiguous tensors by the ranks of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.comm.groups import Group
from slipstream.transport.p2p import transfer

Maybe = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Like:
        """Shape, dtype and device of ``x``."""
        return cls(x.shape, x.dtype, x.device)

    def empty(self) -> torch.Tensor:
        """A new tensor, contiguous."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        """A new tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def sized(self, size: int, axis: int) -> Like:
        """As long as ``size`` along ``axis``."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return Like(shape, self.dtype, self.device)


def copy(x: torch.Tensor) -> torch.Tensor:
    """A new tensor, contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


def wire(x: torch.Tensor) -> torch.Tensor:
    """A view in a dtype that every backend moves: complex as pairs, bool and 8-bit floats as bytes.

    A view of complex numbers may be added up, one of bytes may not.
    """
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype in _AS_BYTES else x.resolve_neg()


def carry(
    receives: Mapping[int, torch.Tensor],
    sends: Mapping[int, torch.Tensor],
    group: Group,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`transfer` by the ranks of ``group``; only tensors that are not contiguous are copied.

    Meanwhile the first of ``own`` is filled from the second.
    """
    if group.size == 1:
        if own is not None:
            own[0].copy_(own[1])
        return
    places = group.places
    rooms = {rank: _room(x) for rank, x in receives.items()}
    transfer(
        {places[rank]: wire(room) for rank, room in rooms.items()},
        {places[rank]: wire(x.contiguous()) for rank, x in sends.items()},
        group.members,
        None if own is None else partial(own[0].copy_, own[1]),
    )
    for rank, room in rooms.items():
        if room is not receives[rank]:
            receives[rank].copy_(room)


def exchange(receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor], group: Group) -> None:
    """``send[i]`` goes to the group's rank ``i``, and what comes from it fills ``receive[i]``.

    Every rank begins with its next neighbour, so that no two of them begin with the same one.
    """
    rank, size = group.rank, group.size
    others = [(rank + distance) % size for distance in range(1, size)]
    carry(
        {r: receive[r] for r in reversed(others)},
        {r: send[r] for r in others},
        group,
        (receive[rank], send[rank]),
    )


def _room(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a contiguous tensor like it."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


_AS_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
