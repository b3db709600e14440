"""Measure how fast each rank computes, all at once."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from slipstream.calibration.contention import piece_of_compute
from slipstream.parallel.dims import gather_objects

SECONDS = 2.0
"""A quota of a host's cores is dealt out in periods of a tenth of a second."""
SAME = 0.1
"""Ranks that are slower than the fastest by less are as fast."""


def rank_speeds(
    world: dist.ProcessGroup, device: torch.device, replica: int, replicas: int
) -> list[float]:
    """Measure how fast each replica computes, the fastest being 1; the same on every rank.

    A replica is as fast as the slowest of its ranks. A collective; takes two seconds.

    Args:
        world: all ranks.
        device: where they compute.
        replica: that of this rank; of ``replicas``.
    """
    dist.barrier(group=world)
    compute, units = piece_of_compute(device), 0
    compute()
    start = perf_counter()
    while not units or perf_counter() - start < SECONDS:
        compute()
        units += 1
    rate = units / (perf_counter() - start)
    every = gather_objects((replica, rate), "the speeds of the ranks", world)
    slowest = [min(rate for number, rate in every if number == n) for n in range(replicas)]
    return relative(slowest)


def relative(rates: list[float]) -> list[float]:
    """Rates as parts of the fastest.

    Example:
        >>> relative([50.0, 46.0, 25.5])
        [1.0, 1.0, 0.51]
    """
    fastest = max(rates)
    return [1.0 if rate >= (1 - SAME) * fastest else round(rate / fastest, 2) for rate in rates]
