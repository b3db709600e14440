"""Moves tensors of any layout and dtype between the ranks of a `Group`, by their rank in the group.

``transport.p2p`` moves contiguous tensors by process group rank; this file converts to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from slipstream.comm.groups import Group
from slipstream.transport.p2p import transfer

SENT_AS_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that not every backend moves; they travel as uint8, and cannot be reduced."""


def contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, also where ``x`` is contiguous already."""
    return x.clone(memory_format=torch.contiguous_format)


def wire_view(x: torch.Tensor) -> torch.Tensor:
    """A view of ``x`` in a dtype that every backend moves.

    Complex numbers become pairs of floats, which may be reduced by sum; bool and 8-bit floats
    become bytes, which may not be reduced.
    """
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype in SENT_AS_BYTES else x.resolve_neg()


def transfer_in_group(
    receives: Mapping[int, torch.Tensor],
    sends: Mapping[int, torch.Tensor],
    group: Group,
    local_copy: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`transfer` with ranks of ``group`` as keys; only tensors that are not contiguous are copied.

    ``local_copy``: a target and a source on this rank, copied while the transfers run.
    """
    if group.size == 1:
        if local_copy is not None:
            local_copy[0].copy_(local_copy[1])
        return
    ranks = group.process_group_ranks
    buffers = {
        rank: x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        for rank, x in receives.items()
    }
    received = {ranks[rank]: wire_view(buffer) for rank, buffer in buffers.items()}
    sent = {ranks[rank]: wire_view(x.contiguous()) for rank, x in sends.items()}
    meanwhile = None if local_copy is None else partial(local_copy[0].copy_, local_copy[1])
    transfer(received, sent, group.members, meanwhile)
    for rank, buffer in buffers.items():
        if buffer is not receives[rank]:
            receives[rank].copy_(buffer)


def exchange_pieces(
    receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor], group: Group
) -> None:
    """Send ``send[i]`` to the group's rank ``i``; fill ``receive[i]`` with what it sends here."""
    rank, size = group.rank, group.size
    # Each rank starts with its next neighbour, so that no two of them start with the same peer.
    peers = [(rank + distance) % size for distance in range(1, size)]
    receives = {peer: receive[peer] for peer in reversed(peers)}
    sends = {peer: send[peer] for peer in peers}
    transfer_in_group(receives, sends, group, (receive[rank], send[rank]))
