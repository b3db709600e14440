"""Workloads whose iterations are easily computed by hand, for tests of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.workload import Workload
from tests.planner.networks import MB


def workload(ranks: int = 4, count: int = 6, late: float = 0.0, **changes: Any) -> Workload:
    """Forward 0.2, backward 0.6, optimizer 0.03 s; gradients of 1 MB come at equal distances.

    Rank ``r`` takes ``r * late`` longer for backward.
    """
    one = np.ones(ranks)
    backward = 0.6 + late * np.arange(ranks)
    shares = np.arange(1, count + 1) / count
    values: dict[str, Any] = {
        "gradients": tuple(Gradient(f"{i}.weight", str(i), MB) for i in range(count)),
        "data_wait": 0.01 * one,
        "other": 0.02 * one,
        "forward": 0.2 * one,
        "backward": backward,
        "ready": backward[:, None] * shares,
        "optimizer": 0.03 * one,
        "samples": 8 * one,
    }
    return Workload(**values | changes)


def random_workload(seed: int, ranks: int, count: int) -> Workload:
    """Everything uneven: ranks, ready times, sizes from bytes to megabytes."""
    random = np.random.default_rng(seed)
    backward = random.uniform(0.3, 0.9, ranks)
    shares = np.cumsum(random.random((ranks, count)), axis=1)
    sizes = (10 ** random.uniform(1, 7, count)).astype(int)
    return workload(
        ranks,
        count,
        gradients=tuple(Gradient(f"g{i}", str(i // 2), int(s)) for i, s in enumerate(sizes)),
        data_wait=random.uniform(0, 0.05, ranks),
        other=random.uniform(0, 0.02, ranks),
        forward=random.uniform(0.1, 0.4, ranks),
        backward=backward,
        ready=backward[:, None] * shares / shares[:, -1:],
        optimizer=random.uniform(0.01, 0.05, ranks),
        buffers_bytes=int(random.integers(0, 2) * 50_000),
    )
