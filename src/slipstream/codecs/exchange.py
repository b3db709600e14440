"""What a codec asks of the network, one request after the other, without ever touching it.

An exchange is a generator: it yields a request, whoever runs it sees to that the tensors are moved,
and goes on with ``next``. So codecs know nothing of process groups, every step of theirs can be
driven by a loop (``run_together``), and one driver serves the engine and DDP's hooks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Leave the sum over ranks in ``tensor``."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Row ``i`` of ``send`` goes to rank ``i``; row ``j`` of ``receive`` comes from rank ``j``."""

    send: torch.Tensor
    receive: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllGather:
    """``send`` of rank ``j`` comes to row ``j`` of ``receive`` on every rank."""

    send: torch.Tensor
    receive: torch.Tensor


Request = AllReduce | AllToAll | AllGather
Exchange = Generator[Request, None, None]


def sent_bytes(request: Request, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends: a ring's sum, and what goes to others of the rest.

    Example:
        >>> sent_bytes(AllReduce(torch.zeros(100)), 4)
        600.0
    """
    if ranks == 1:
        return 0.0
    match request:
        case AllReduce(tensor):
            return 2 * (ranks - 1) / ranks * tensor.nbytes
        case AllToAll(send, _):
            return (ranks - 1) / ranks * send.nbytes
        case AllGather(send, _):
            return float((ranks - 1) * send.nbytes)


def run_together(exchanges: Sequence[Exchange]) -> float:
    """Run the exchanges of all ranks in one process; returns the bytes that each rank would send.

    The plain reference of a network: sums in rank order.

    Raises:
        RuntimeError: the ranks ask for different things.
    """
    sent = 0.0
    while True:
        requests = [next(exchange, None) for exchange in exchanges]
        first = requests[0]
        if any(type(request) is not type(first) for request in requests):
            raise RuntimeError(f"ranks ask for different things: {[type(r) for r in requests]}")
        if first is None:
            return sent
        sent += sent_bytes(first, len(exchanges))
        _serve(requests)


def _serve(requests: Sequence[Request | None]) -> None:
    sums = [r.tensor for r in requests if isinstance(r, AllReduce)]
    if sums:
        total = sums[0].clone()
        for other in sums[1:]:
            total += other
        for summed in sums:
            summed.copy_(total)
    for rank, request in enumerate(requests):
        for peer, their in enumerate(requests):
            if isinstance(request, AllToAll) and isinstance(their, AllToAll):
                request.receive[peer].copy_(their.send[rank])
            elif isinstance(request, AllGather) and isinstance(their, AllGather):
                request.receive[peer].copy_(their.send)
