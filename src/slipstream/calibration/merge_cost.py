"""Measure what ``local`` computes beside its exchanges: the arithmetic of a meeting."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from slipstream.calibration.codec_cost import synchronize
from slipstream.transport.consistency import maximum

NUMEL = 2**21
"""Values of the fragment: its tensors do not fit into a cache together."""
ROUNDS, FEWEST = 20, 5


def merge_cost(world: dist.ProcessGroup, device: torch.device, share: float = 1.0) -> float:
    """Seconds for each byte of a change that the slowest rank takes to send it and to merge the
    mean, measured on all ranks at once.

    The passes over memory are those of ``local/meeting.py``. ``share``: the part of the usual time
    to take.
    """
    own = torch.zeros(NUMEL, dtype=torch.float32, device=device)
    outer = torch.zeros_like(own)
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.SGD([outer], 0.7, 0.9, nesterov=True, fused=fused)
    times = []
    dist.barrier(group=world)
    for _ in range(max(round(share * ROUNDS), FEWEST)):
        start = perf_counter()
        sent = own.clone()
        change = outer - sent
        if change.sum().isfinite():  # as a meeting looks at it
            outer.grad = change
            optimizer.step()
        own.sub_(sent.sub_(outer))
        synchronize(device)
        times.append(perf_counter() - start)
    per_byte = median(times) / own.nbytes
    found = maximum(torch.tensor([per_byte], dtype=torch.float64, device=device), world)
    return float(found[0])
