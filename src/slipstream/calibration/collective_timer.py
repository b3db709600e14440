"""Time collectives on all ranks at once: seconds over bytes, within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from statistics import median, stdev
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.cluster.connect import Cluster
from slipstream.errors import ClusterError
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import CollectiveName
from slipstream.strategy import DirectConfig, SharedMemoryConfig, TransportConfig
from slipstream.transport.consistency import maximum
from slipstream.transport.requests import AllGather, AllReduce, ReduceScatter, Request
from slipstream.transport.transport import Transport, make_transport

DIRECT, MEMORY = DirectConfig(), SharedMemoryConfig()


class Lanes:
    """Ways for the collectives of one group: the group itself, and transports on it.

    Args:
        group: of this rank; nobody else uses it meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()
        self._transports: dict[TransportConfig, Transport] = {}

    def carry(self, request: Request, by: TransportConfig = DIRECT) -> None:
        """Carry it out by a transport, which is made when it is first used."""
        if by not in self._transports:
            self._transports[by] = make_transport(by, self.group)
        for work in self._transports[by].start(request):
            work.wait()

    def rows(self, whole: Tensor) -> Tensor:
        """The whole tensor, a row a rank."""
        return whole.view(self.ranks, -1)

    def close(self) -> None:
        """End the threads of the transports."""
        for transport in self._transports.values():
            transport.close()


StartCollective = Callable[[Tensor, Tensor, Lanes], object]
"""Carry out a collective on (whole tensor, part of a rank, lanes)."""

COLLECTIVES: Mapping[CollectiveName, StartCollective] = {
    "all_reduce": lambda whole, _, lanes: dist.all_reduce(whole, group=lanes.group),
    "direct_all_reduce": lambda whole, _, lanes: lanes.carry(AllReduce(whole)),
    "shared_memory_all_reduce": lambda whole, _, lanes: lanes.carry(AllReduce(whole), MEMORY),
    "reduce_scatter": lambda whole, part, lanes: lanes.carry(
        ReduceScatter(lanes.rows(whole), part)
    ),
    "all_gather": lambda whole, part, lanes: lanes.carry(AllGather(part, lanes.rows(whole))),
}
"""Each as the transports carry it out, alone and waited for."""

DTYPE = torch.float32
"""Of the elements that are exchanged, whatever the script's default is."""
ELEMENT = DTYPE.itemsize
WARM_UP = 5
"""Exchanges before the first that counts."""
BLOCK = 0.01
"""Seconds that are timed at once, if one exchange takes less ..."""
MOST_AT_ONCE = 64
"""... but no more exchanges than this."""
ENOUGH = 0.25
"""Seconds of measurement after which a size needs no more rounds."""
SHORT = 0.1
"""Seconds of an exchange up to which its first run is left out: warming up would distort it."""
LONG = 1.0
"""Seconds of an exchange that is measured only once."""
FAR, STRIDE = 1.5, 16
"""On a long line small exchanges all take its latency. Where there is no time for all of them, each
size is ``STRIDE`` times the last, until two take ``FAR`` times as long as the smallest: a
connection that was idle begins slowly, and by the first of them a byte costs several times what it
costs of larger ones."""
PATIENCE = 5.0
"""Seconds that a size may be expected to take which is to show what its bytes cost, however few
there are for all; it takes a quarter of them on such a line."""


@dataclass
class Timing:
    """The measurement of one size: seconds of the first exchange, and of those in each block."""

    call: Callable[[], object]
    elements: int
    first: float
    blocks: list[float] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * ELEMENT

    @property
    def repeat(self) -> int:
        """Exchanges that are timed at once."""
        return min(max(round(BLOCK / self.first), 1), MOST_AT_ONCE)

    @property
    def wanted(self) -> int:
        """Blocks that are worth their time."""
        return 0 if self.first > LONG else max(round(ENOUGH / self.first / self.repeat), 2)

    @property
    def seconds(self) -> float:
        """The median over blocks; long exchanges count their first run, too."""
        first = [self.first] if self.first > SHORT or not self.blocks else []
        return median(self.blocks + first)


class CollectiveTimer:
    """Times collectives of several sizes. All ranks make the same calls.

    What is measured next depends only on times that all ranks have agreed on (the maximum over
    ranks), so ranks never issue different collectives.

    Args:
        ranks: 2 or more, as `connect` gives them.
        sizes: bytes, rounded up to whole elements on every rank.
        rounds: the most times that a size is measured.

    Raises:
        ClusterError: fewer than two ranks or two sizes.
    """

    def __init__(self, ranks: Cluster, sizes: Sequence[int], rounds: int) -> None:
        if ranks.world is None or ranks.world_size < 2:
            raise ClusterError(
                f"{ranks.world_size} rank has no network to measure; start 2 or more, e.g. "
                "slipstream doctor network --ranks 2"
            )
        if len(set(sizes)) < 2 or min(sizes) < 1:
            raise ClusterError(
                f"sizes {list(sizes)}: must be two or more different numbers of bytes"
            )
        self.world, self._device = ranks.world, ranks.device
        self._sizes, self._rounds = sorted(set(sizes)), rounds
        elements = self._sizes[-1] // ELEMENT + ranks.world_size
        # Written once: the first touch of a page of memory takes longer than later ones.
        self._whole = torch.empty(elements, dtype=DTYPE, device=ranks.device).zero_()
        self._part = torch.empty(elements // 2 + 1, dtype=DTYPE, device=ranks.device).zero_()

    def curve(
        self,
        name: CollectiveName,
        group: dist.ProcessGroup,
        seconds: float,
        progress: Callable[[float], None] = lambda share: None,
    ) -> tuple[Curve, float]:
        """The curve of one collective, and the seconds that are left.

        First each size once, up to the first for which the time does not suffice, but at least to
        one that takes longer for its bytes; then all sizes in rounds, so that a disturbance of the
        machine affects them alike.

        Args:
            name: the collective.
            group: this rank's group; all groups of its kind exchange at the same time.
            seconds: about the longest that this may take.
            progress: called with the share of ``seconds`` that is used.
        """
        with closing(Lanes(group)) as lanes:
            return self._curve(name, lanes, seconds, progress)

    def _curve(
        self, name: CollectiveName, lanes: Lanes, seconds: float, progress: Callable[[float], None]
    ) -> tuple[Curve, float]:
        timings: list[Timing] = []
        left = seconds
        counts = sorted({-(-size // ELEMENT // lanes.ranks) for size in self._sizes})
        for count in counts:
            elements = count * lanes.ranks
            call = partial(COLLECTIVES[name], self._whole[:elements], self._part[:count], lanes)
            needed = len(timings) < 2 and count == counts[-1]
            in_time = not timings or timings[0].first * len(counts) <= seconds / 2
            if not in_time and not needed and _says_nothing_new(timings, elements):
                continue
            if len(timings) >= 2:
                expected = _expected(timings, elements)
                if expected > (left if _shows_bytes(timings) else max(seconds, PATIENCE)):
                    break
            if not timings:
                (first,) = self._slowest([self._timed(call, 1)])
                self._timed(call, WARM_UP if first < SHORT else 1)  # on all ranks
            (first,) = self._slowest([self._timed(call, 1)])
            if first < BLOCK or not timings:  # the first says whether this is a long line
                first = min(first, *self._slowest([self._timed(call, 1) for _ in range(3)]))
            timings.append(Timing(call, elements, first))
            left -= first
            progress(min(1 - left / seconds, 1.0))
        for index in range(self._rounds):
            todo = [timing for timing in timings if index < timing.wanted]
            while todo and sum(timing.first * timing.repeat for timing in todo) > left:
                todo.pop()
            blocks = self._slowest([self._timed(timing.call, timing.repeat) for timing in todo])
            for timing, block in zip(todo, blocks, strict=True):
                timing.blocks.append(block)
                left -= block * timing.repeat
            progress(min(1 - left / seconds, 1.0))
        points = [(timing.num_bytes, round(timing.seconds, 9)) for timing in timings]
        return Curve.fit(points, _noise(timings)), left

    def _timed(self, call: Callable[[], object], repeat: int) -> float:
        """Seconds of one of ``repeat`` calls in a row, behind a barrier."""
        self._slowest([0.0])
        start = perf_counter()
        for _ in range(repeat):
            call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (perf_counter() - start) / repeat

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """The maximum over ranks of each value."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        return [float(time) for time in maximum(times, self.world).tolist()]


def _noise(timings: Sequence[Timing]) -> float | None:
    """The relative standard deviation of a block, the median over sizes that were timed more than
    once."""
    timed = [timing.blocks for timing in timings if len(timing.blocks) > 1]
    spreads = [stdev(blocks) / median(blocks) for blocks in timed]
    return round(median(spreads), 4) if spreads else None


def _shows_bytes(timings: Sequence[Timing]) -> bool:
    """Whether the last two exchanges took longer than the first for their bytes."""
    return all(timing.first >= FAR * timings[0].first for timing in timings[-2:])


def _says_nothing_new(timings: Sequence[Timing], elements: int) -> bool:
    """Whether an exchange of so many would take the latency of the line, as the smaller ones."""
    return not _shows_bytes(timings) and elements < STRIDE * timings[-1].elements


def _expected(timings: Sequence[Timing], elements: int) -> float:
    """Seconds of a larger exchange, by the line through the last two."""
    before, last = timings[-2:]
    slope = (last.first - before.first) / (last.elements - before.elements)
    return last.first + max(slope, 0.0) * (elements - last.elements)
