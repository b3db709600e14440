"""Measure how much computing and exchanging slow each other down on live ranks.

Ranks of one host may share its cores. The number of threads that torch computes with stays as it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log
from queue import SimpleQueue
from statistics import median, stdev
from time import perf_counter

import torch
import torch.distributed as dist

from slipstream.calibration.collective_timer import DTYPE, ELEMENT
from slipstream.planner.network.costs import Contention
from slipstream.planner.network.curve import Curve
from slipstream.transport.consistency import maximum
from slipstream.transport.requests import AllReduce
from slipstream.transport.transport import Transport
from slipstream.transport.work import Work

ROUNDS = 3
AT_ONCE = 4
"""Tensors that are exchanged; a round issues at least as many exchanges."""
LARGEST = 16 * 2**20
"""Bytes of each, at most."""
MOST = 256
"""Exchanges of one round, at most."""
CROWD = 16
"""Exchanges in flight together where these are timed."""


def measure_contention(
    world: dist.ProcessGroup,
    device: torch.device,
    transport: Transport,
    all_reduce: Curve,
    seconds: float,
) -> Contention:
    """Measure how much computing and exchanging slow each other down; the same on every rank.

    All ranks compute a fixed piece of work alone, exchange alone, and then do both at once with
    exchanges in flight all the time: once large ones, and once the smallest, which are only
    latency. Computing counts by its mean over ranks, exchanges by the last rank; both by the median
    over rounds, and at least 0.

    Args:
        world: all ranks.
        device: where they compute, and of the tensors that they exchange.
        transport: carries out their all-reduces, on a group that nobody else uses meanwhile.
        all_reduce: what these cost.
        seconds: about how long computing alone and exchanging alone take in each of ROUNDS rounds.
    """
    smallest, large = all_reduce.points[0][0], _largest(all_reduce, AT_ONCE, seconds)
    ratios, spreads = {}, []
    # Beside computing a small exchange takes many times as long: a quarter of the time is enough.
    for num_bytes, share in {smallest: 0.25, large: 1.0}.items():
        count = round(seconds * share / all_reduce.seconds(num_bytes))
        tensors = torch.empty(AT_ONCE, num_bytes // ELEMENT, dtype=DTYPE, device=device).zero_()
        in_turn = [tensors[i % AT_ONCE] for i in range(min(max(count, AT_ONCE), MOST))]
        pair = _ComputeAndExchange(world, device, transport, in_turn)
        rounds = [pair.round(seconds) for _ in range(ROUNDS)]
        ratios[num_bytes] = list(map(median, zip(*rounds, strict=True)))
        for each in zip(*rounds, strict=True):  # below 1 there is no slowdown
            spreads.append(stdev(log(max(factor, 1.0)) for factor in each))
    compute, exchange = ratios[large]
    latency = max(ratios[smallest][1], 1.0)
    total, waiting = all_reduce.seconds(large), all_reduce.latency
    if total > 2 * waiting:  # else the difference would be mostly noise
        exchange = (exchange * total - latency * waiting) / (total - waiting)
    factors = {"compute": compute, "exchange": exchange, "latency": latency}
    slowdowns = {f"{name}_slowdown": max(round(f - 1, 4), 0.0) for name, f in factors.items()}
    share, most = _queue(world, device, transport, all_reduce, seconds)
    noise = round(median(spreads), 4)
    return Contention(**slowdowns, queue_share=share, queue_seconds=most, noise=noise)


def crowd_slowdown(
    world: dist.ProcessGroup,
    device: torch.device,
    transport: Transport,
    all_reduce: Curve,
    per_byte: float,
    seconds: float,
) -> float:
    """Measure how much longer many exchanges in flight take than their bytes, beside no computing.

    The last rank counts, the median over rounds, and at least 0; the same on every rank.

    Args:
        world, device, transport, all_reduce: as of `measure_contention`.
        per_byte: seconds for a byte of an all-reduce at the rate of the link.
        seconds: about how long the exchanges take in each of ROUNDS rounds.
    """
    num_bytes = _largest(all_reduce, CROWD, seconds)
    tensors = torch.empty(AT_ONCE, num_bytes // ELEMENT, dtype=DTYPE, device=device).zero_()
    crowd = [tensors[i % AT_ONCE] for i in range(CROWD)]
    exchanges = _ComputeAndExchange(world, device, transport, crowd)
    times = [exchanges.alone() for _ in range(ROUNDS)]
    return max(round(median(times) / (CROWD * num_bytes * per_byte) - 1, 4), 0.0)


def _largest(all_reduce: Curve, count: int, seconds: float) -> int:
    """Bytes of the largest exchange of which so many take so long at most, else of the smallest."""
    fitting = [n for n, t in all_reduce.points if t * count <= seconds and n <= LARGEST]
    return max(fitting, default=all_reduce.points[0][0])


def _queue(
    world: dist.ProcessGroup,
    device: torch.device,
    transport: Transport,
    all_reduce: Curve,
    seconds: float,
) -> tuple[float, float]:
    """The time of the smallest exchange behind a large one: as a share of that one, and at most.

    NCCL runs the collectives of a group one after the other, so the share is 1 there.
    """
    smallest, alone = all_reduce.points[0]
    sizes = [n for n, t in all_reduce.points if 4 * alone <= t <= 4 * seconds and n <= LARGEST]
    if device.type == "cuda" or not sizes:
        return 1.0, all_reduce.points[-1][1]
    shares, waits = [], []
    for num_bytes in sizes:
        rounds = [
            _one_behind_the_other(world, transport, num_bytes, smallest) for _ in range(ROUNDS)
        ]
        large, small = map(median, zip(*rounds, strict=True))
        shares.append(small / large)
        waits.append(small)
    # Behind the largest ones the wait has reached its maximum: the smaller half tells the share.
    slowest = torch.tensor(
        [median(shares[: len(shares) // 2 + 1]), max(waits)], dtype=torch.float64
    )
    share, most = maximum(slowest, world).tolist()
    return min(round(share, 4), 1.0), round(most, 6)


def _one_behind_the_other(
    world: dist.ProcessGroup, transport: Transport, large: int, small: int
) -> tuple[float, float]:
    """Seconds of an exchange of ``large`` bytes, and of a ``small`` one issued behind it."""
    requests = {
        size: AllReduce(torch.zeros(size // ELEMENT, dtype=DTYPE)) for size in (large, small)
    }
    transport.prepare([*requests.values()])
    dist.barrier(group=world)
    ended: SimpleQueue[tuple[int, float]] = SimpleQueue()
    start, works = perf_counter(), []
    for num_bytes, request in requests.items():
        work = transport.start(request)[-1]
        done = partial(lambda size, _: ended.put((size, perf_counter() - start)), num_bytes)
        work.get_future().add_done_callback(done)
        works.append(work)
    for work in works:
        work.wait()
    ends = dict(ended.get() for _ in works)  # a wait may return before its callback has run
    return ends[large], min(ends[small], ends[large])


def _is_done(work: Work) -> bool:
    # The future of an NCCL work is done as soon as it is on its stream.
    return work.is_completed() if isinstance(work, dist.Work) else work.get_future().done()


def piece_of_compute(device: torch.device) -> Callable[[], None]:
    """A fixed piece of compute, half bound by arithmetic and half by memory; returns at its end."""
    side = 2048 if device.type == "cuda" else 256
    generator = torch.Generator(device).manual_seed(0)  # the user's stays as it is
    matrix, product = torch.rand(2, side, side, dtype=DTYPE, device=device, generator=generator)
    vector = torch.zeros(2**20, dtype=DTYPE, device=device)

    def compute() -> None:
        torch.mm(matrix, matrix, out=product)
        vector.add_(1.0)
        _synchronize(device)

    return compute


def _synchronize(device: torch.device) -> None:
    # The current stream alone: exchanges on other streams are to go on beside compute.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _ComputeAndExchange:
    """A piece of compute, over and over, and exchanges."""

    def __init__(
        self,
        world: dist.ProcessGroup,
        device: torch.device,
        transport: Transport,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._world, self._device, self._transport = world, device, transport
        self._tensors, self._compute = tensors, piece_of_compute(device)

    def round(self, seconds: float) -> tuple[float, float]:
        """Times of computing and of exchanging, both at once over each alone, over all ranks."""
        self._reduced([0.0], dist.ReduceOp.SUM)  # a barrier
        start, units = perf_counter(), 0
        while not units or perf_counter() - start < seconds:
            self._compute()
            units += 1
        computing = (perf_counter() - start) / units
        exchanging, _ = self._exchange(compute=False)
        both, unit = self._exchange(compute=True)
        ratio = self._reduced([unit / computing], dist.ReduceOp.SUM)[0] / self._world.size()
        slowest, alone = self._reduced([both, exchanging], dist.ReduceOp.MAX)
        return ratio, slowest / alone

    def alone(self) -> float:
        """Seconds until all exchanges have ended on all ranks, none of which computes."""
        return self._reduced([self._exchange(compute=False)[0]], dist.ReduceOp.MAX)[0]

    def _exchange(self, compute: bool) -> tuple[float, float]:
        """Seconds until all exchanges have ended, and of each unit computed meanwhile."""
        requests = [AllReduce(tensor) for tensor in self._tensors]
        self._transport.prepare(requests)
        self._reduced([0.0], dist.ReduceOp.SUM)  # a barrier
        start, units = perf_counter(), 0
        works = [work for request in requests for work in self._transport.start(request)]
        while compute and not (units and all(map(_is_done, works))):
            self._compute()
            units += 1
        for work in works:
            work.wait()
        _synchronize(self._device)
        seconds = perf_counter() - start
        return seconds, seconds / max(units, 1)

    def _reduced(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, op=op, group=self._world)
        return [float(value) for value in total.tolist()]
