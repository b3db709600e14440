"""How much computing and exchanging slow each other down on live ranks, which may share cores.

Never changes how many threads torch computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from slipstream.planner.curve import Curve

ROUNDS = 3
AT_ONCE = 4
"""Tensors that travel; as many exchanges are issued at least."""
LARGEST = 16 * 2**20
"""Bytes of each, at most."""
MOST = 256
"""Exchanges of one round, at most."""


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """By which share things take longer; the same on every rank.

    ``compute``: computing beside an exchange. ``latency`` and ``exchange``: the latency of an
    exchange, and what follows it, beside computing. A small exchange beside a large one takes
    ``queue_share`` of its time, but ``queue_seconds`` at most: its messages wait behind those of
    the other, of which the network takes in only so much at once.
    """

    compute: float
    exchange: float
    latency: float
    queue_share: float
    queue_seconds: float


def contention(
    world: dist.ProcessGroup, device: torch.device, all_reduce: Curve, seconds: float
) -> Slowdowns:
    """How much computing and exchanging slow each other down.

    All ranks compute the same fixed work alone, exchange alone, and then do both at once, with an
    exchange in flight all the time: once large ones and once the smallest, which are nothing but
    latency. Of computing the mean over ranks counts, of exchanges the last rank; of each the median
    over rounds, and at least 0.

    Args:
        world: all ranks.
        device: where they compute, and of what they exchange.
        all_reduce: what their all-reduces cost.
        seconds: about how long computing alone and exchanging alone take in each of ROUNDS rounds.
    """
    fast = [
        num_bytes
        for num_bytes, t in all_reduce.points
        if t * AT_ONCE <= seconds and num_bytes <= LARGEST
    ]
    smallest = all_reduce.points[0][0]
    large = max(fast, default=smallest)
    ratios = {}
    # Beside computing a small one takes many times as long: a quarter of the time is enough.
    for num_bytes, share in {smallest: 0.25, large: 1.0}.items():
        count = round(seconds * share / all_reduce.seconds(num_bytes))
        tensors = torch.empty(AT_ONCE, num_bytes // 4, device=device).zero_()
        bench = _Bench(
            world, device, [tensors[i % AT_ONCE] for i in range(min(max(count, AT_ONCE), MOST))]
        )
        rounds = [bench.round(seconds) for _ in range(ROUNDS)]
        ratios[num_bytes] = [median(column) for column in zip(*rounds, strict=True)]
    compute, rest = ratios[large]
    latency = max(ratios[smallest][1], 1.0)
    total, waiting = all_reduce.seconds(large), all_reduce.latency
    if total > 2 * waiting:  # else the difference would be nothing but noise
        rest = (rest * total - latency * waiting) / (total - waiting)
    share, most = _queue(world, device, all_reduce, seconds)
    return Slowdowns(
        compute=_above_one(compute),
        exchange=_above_one(rest),
        latency=_above_one(latency),
        queue_share=share,
        queue_seconds=most,
    )


def _above_one(factor: float) -> float:
    return max(round(factor - 1, 4), 0.0)


def _queue(
    world: dist.ProcessGroup, device: torch.device, all_reduce: Curve, seconds: float
) -> tuple[float, float]:
    """The share of a large exchange that the smallest one beside it takes, and the most it takes.

    NCCL runs the collectives of a group one after the other: there it is all of it.
    """
    smallest, alone = all_reduce.points[0]
    sizes = [n for n, t in all_reduce.points if 4 * alone <= t <= 4 * seconds and n <= LARGEST]
    if device.type == "cuda" or not sizes:
        return 1.0, all_reduce.points[-1][1]
    shares, longest = [], []
    for num_bytes in sizes:
        rounds = [_beside(world, num_bytes, smallest) for _ in range(ROUNDS)]
        large, small = (median(column) for column in zip(*rounds, strict=True))
        shares.append(small / large)
        longest.append(small)
    found = torch.tensor([median(shares[: len(shares) // 2 + 1]), max(longest)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=world)
    share, most = found.tolist()
    return min(round(share, 4), 1.0), round(most, 6)


def _beside(world: dist.ProcessGroup, large: int, small: int) -> tuple[float, float]:
    """Seconds of an exchange of ``large`` bytes, and of a ``small`` one issued behind it."""
    dist.barrier(world)
    ends: dict[int, float] = {}
    start, works = perf_counter(), []
    for num_bytes in (large, small):
        work = dist.all_reduce(torch.zeros(num_bytes // 4), group=world, async_op=True)
        assert work is not None
        done = partial(lambda size, _: ends.__setitem__(size, perf_counter() - start), num_bytes)
        work.get_future().add_done_callback(done)
        works.append(work)
    for work in works:
        work.wait()
    dist.barrier(world)
    return ends[large], min(ends[small], ends[large])


class _Bench:
    """A fixed piece of work, half bound by arithmetic and half by memory, and exchanges."""

    def __init__(
        self, world: dist.ProcessGroup, device: torch.device, tensors: Sequence[torch.Tensor]
    ) -> None:
        self._world, self._device, self._tensors = world, device, tensors
        side = 2048 if device.type == "cuda" else 256
        self._matrix, self._product = torch.rand(2, side, side, device=device)
        self._stream = torch.zeros(2**20, device=device)

    def round(self, seconds: float) -> tuple[float, float]:
        """Of all ranks: times both at once over times alone, of computing and of exchanging."""
        self._meet()
        start, units = perf_counter(), 0
        while perf_counter() - start < seconds:
            self._compute()
            units += 1
        computing = (perf_counter() - start) / units
        exchanging, _ = self._exchange(compute=False)
        both, beside = self._exchange(compute=True)
        ratio = self._reduced([beside / computing], dist.ReduceOp.SUM)[0] / self._world.size()
        slowest, alone = self._reduced([both, exchanging], dist.ReduceOp.MAX)
        return ratio, slowest / alone

    def _exchange(self, compute: bool) -> tuple[float, float]:
        """Seconds until all exchanges have landed, and of each unit computed meanwhile."""
        self._meet()
        start, units = perf_counter(), 0
        works = [dist.all_reduce(t, group=self._world, async_op=True) for t in self._tensors]
        while compute and not (units and all(w is None or w.is_completed() for w in works)):
            self._compute()
            units += 1
        for work in works:
            if work is not None:
                work.wait()
        self._finish()
        seconds = perf_counter() - start
        return seconds, seconds / max(units, 1)

    def _compute(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
        self._stream.add_(1.0)
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _meet(self) -> None:
        self._reduced([0.0], dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, op=op, group=self._world)
        return [float(value) for value in total.tolist()]
