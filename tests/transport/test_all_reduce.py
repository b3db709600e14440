"""One all-reduce: begun by the call, done when its work is."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.transport.all_reduce import start_all_reduce
from tests.harness.ranks import Ranks


def reduced(size: int) -> tuple[int, bool]:
    tensor = torch.arange(float(size)) * (dist.get_rank() + 1)
    works = start_all_reduce(tensor, dist.group.WORLD)
    for work in works:
        work.wait()
    return len(works), torch.equal(tensor, torch.arange(float(size)) * 3)


def test_the_sum_replaces_the_tensor() -> None:
    with Ranks(2) as two:
        for size in (0, 1, 7, 1000):
            assert two.run(reduced, size) == [(1, True)] * 2
