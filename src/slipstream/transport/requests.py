"""Requests to the network, as values. Never communicates: a transport does.

An exchange of several dependent collectives is a generator. It yields a request, goes on once the
tensors have been moved, and yields the next one; ``transport.transport.run`` drives it. So the code
of codecs and sparse gradients knows nothing of process groups, and a plain loop can drive every
step of it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class ReduceInHosts:
    """Leave in each share of ``tensor``, on the rank of its rail, the sum over this host's ranks.

    Share ``i`` reaches from ``borders[i]`` to ``borders[i + 1]``, and is rail ``i``'s
    (``transport.hosts.Rails``). Only the hierarchical transport knows hosts.
    """

    tensor: torch.Tensor
    borders: Sequence[int]


@dataclass(frozen=True, slots=True)
class BetweenHosts:
    """One request on each of this rank's rails, by rail; ranks count as the rail counts them."""

    requests: Mapping[int, Request]


@dataclass(frozen=True, slots=True)
class SpreadInHosts:
    """Copy each share of ``tensor`` from the rank of its rail to all ranks of its host."""

    tensor: torch.Tensor
    borders: Sequence[int]


InHierarchy = ReduceInHosts | BetweenHosts | SpreadInHosts
Request = AllReduce | ReduceScatter | AllToAll | AllGather | Broadcast | InHierarchy
ExchangeSteps = Generator[Request, None, None]


def sent_bytes(request: Request, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends at least, with the algorithm that sends the fewest.

    An all-reduce counts as a ring, of the others only what leaves the rank; a broadcast passes
    through every rank but the last. What stays inside a host is not sent.

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
        case BetweenHosts(requests):
            return sum(sent_bytes(one, ranks) for one in requests.values())
        case ReduceInHosts() | SpreadInHosts():
            return 0.0
