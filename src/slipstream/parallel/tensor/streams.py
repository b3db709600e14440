"""Random numbers of tensor ranks: the same where tensors are whole, their own where they are split.

Dropout of a whole tensor must drop the same values on every rank, or replicas drift apart; dropout
inside a split region must not, or parts of a layer are tied to each other. A split region begins by
drawing one number from the common stream, from which each rank seeds its own, and ends by going
back to the common stream: so recomputing it draws the same again. Source: Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.comm import Group

_LARGE = 2**31 - 1
_STRIDE = 1_000_003


class Streams:
    """The random numbers of one model's ranks; ``split`` and ``whole`` switch between the two."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._generator = _generator(device)
        self._common: torch.Tensor | None = None

    def unify(self) -> None:
        """Every rank goes on with the common stream of the group's first rank."""
        state = self._generator.get_state()
        if self._group.size > 1:
            on_wire = state.to(self._group.device)
            root = self._group.places[0]
            torch.distributed.broadcast(on_wire, group=self._group.members, group_src=root)
            self._generator.set_state(on_wire.cpu())

    def split(self) -> None:
        """From here on this rank draws its own numbers; nothing if it does already."""
        if self._common is not None:
            return
        device = self._generator.device
        drawn = torch.randint(_LARGE, (), generator=self._generator, device=device)
        self._common = self._generator.get_state()
        self._generator.manual_seed(int(drawn) + _STRIDE * (self._group.rank + 1))

    def whole(self) -> None:
        """From here on all ranks draw the same numbers again."""
        if self._common is not None:
            self._generator.set_state(self._common)
            self._common = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, this rank draws its own numbers."""
        self.split()
        try:
            yield
        finally:
            self.whole()


def _generator(device: torch.device) -> torch.Generator:
    """The generator that dropout on ``device`` draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
