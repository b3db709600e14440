"""What can be asked of the network, as values. Never communicates: a transport does.

An exchange of several dependent collectives is a generator. It yields a request, goes on once the
tensors have been moved, and yields the next one; ``transport.run`` drives it. So the code of codecs
and sparse gradients knows nothing of process groups, and a plain loop can drive every step of it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Leave the sum over ranks in ``tensor``."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Leave in ``out``, on rank ``i``, the sum over ranks of row ``i`` of ``rows``.

    ``out`` may be of a wider dtype than what travels. The rows are overwritten.
    """

    rows: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Row ``i`` of ``send`` goes to rank ``i``; row ``j`` of ``receive`` comes from rank ``j``."""

    send: torch.Tensor
    receive: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllGather:
    """``send`` of rank ``j`` fills row ``j`` of ``receive`` on every rank."""

    send: torch.Tensor
    receive: torch.Tensor


@dataclass(frozen=True, slots=True)
class Broadcast:
    """``tensor`` gets the values of the group's first rank."""

    tensor: torch.Tensor


Request = AllReduce | ReduceScatter | AllToAll | AllGather | Broadcast
Exchange = Generator[Request, None, None]


def sent_bytes(request: Request, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends at least, with the algorithm that sends the fewest.

    An all-reduce counts as a ring, of the others only what leaves the rank; a broadcast passes
    through every rank but the last.

    Example:
        >>> sent_bytes(AllReduce(torch.zeros(100)), 4)
        600.0
    """
    match request:
        case AllReduce(tensor):
            return 2 * (ranks - 1) / ranks * tensor.nbytes
        case ReduceScatter(rows, _):
            return (ranks - 1) / ranks * rows.nbytes
        case AllToAll(send, _):
            return (ranks - 1) / ranks * send.nbytes
        case AllGather(send, _):
            return float((ranks - 1) * send.nbytes)
        case Broadcast(tensor):
            return (ranks - 1) / ranks * tensor.nbytes
