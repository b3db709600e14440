"""The flat transport on CPU: every rank sends each other rank its share straight, in two phases.

    1. rank i sends chunk j of its tensor to rank j, which adds up the p chunks it holds;
    2. rank j sends the sum of chunk j to every other rank.

[Note: Why not gloo's ring]
Both move ``2 (p - 1) / p`` of the bytes. gloo's ring does it in ``2 (p - 1)`` steps, each of which waits for a
thread of the neighbour to wake up, add and pass on; while backward keeps the cores busy these threads
wait for their turn, and the wire is idle meanwhile. Here a chunk crosses the network without the help of
any thread but the kernel's, and there are two such waits instead of ``2 (p - 1)``. The figures are in
benchmarks/results.

[Note: One order]
Chunks are added in rank order, whatever their place in the tensor, so the sum of an element does not depend
on what else shared its exchange: all splits give the same bits.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

_scratch = threading.local()


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Leave the sum over ``group`` in the 1-D ``tensor`` on every rank.

    Bytes that each of p ranks sends and receives: ``2 (p - 1) / p * tensor.nbytes``, in ``2 (p - 1)``
    messages each way. Exactness: reordered, the same for every split.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(size)
    peers = [(rank + step) % size for step in range(1, size)]  # all ranks start with another one

    received = _landing(chunks[rank], size)
    arrivals = {p: dist.irecv(received[p], group=group, group_src=p) for p in reversed(peers)}
    departures = [dist.isend(chunks[p], group=group, group_dst=p) for p in peers]
    _add_in_rank_order(chunks[rank], received, arrivals, rank)

    returns = [dist.irecv(chunks[p], group=group, group_src=p) for p in reversed(peers)]
    departures += [dist.isend(chunks[rank], group=group, group_dst=p) for p in peers]
    for work in (*departures, *returns):
        if work is not None:
            work.wait()


def _add_in_rank_order(
    own: torch.Tensor, received: torch.Tensor, arrivals: dict[int, dist.Work], rank: int
) -> None:
    """``own`` becomes the sum of all ranks' chunks, added from rank 0 upwards as they arrive."""
    total: torch.Tensor | None = None
    for peer in range(len(arrivals) + 1):
        if peer == rank:
            total = own if total is None else own.add_(total)
        else:
            arrivals[peer].wait()
            total = received[peer] if total is None else total.add_(received[peer])


def _landing(chunk: torch.Tensor, size: int) -> torch.Tensor:
    """Room for ``size`` chunks like this one; kept by its thread, as fresh pages cost a fault each."""
    needed = size * chunk.nbytes
    memory: torch.Tensor | None = getattr(_scratch, "memory", None)
    if memory is None or memory.numel() < needed:
        memory = _scratch.memory = torch.empty(needed, dtype=torch.uint8)
    return memory[:needed].view(chunk.dtype).view(size, chunk.numel())
