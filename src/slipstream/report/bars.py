"""Lays out one iteration of several ranks as bars: a row of compute, and its exchanges below.

Draws nothing: the page and the picture both draw these bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from slipstream.analysis.time_unit import TimeUnit
from slipstream.report.palette import PALETTE, chart_unit, shortened
from slipstream.report.runs import RecordedRun
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, Event, exchange_order
from slipstream.trace.intervals import Interval, Intervals, lanes, length, subtract, union
from slipstream.trace.timeline import Iteration

MOST_RANKS = 16
MOST_BARS = 6000
"""Spans that the timelines of one report draw at most, so that it opens quickly."""

_COMPUTE = (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER)
_GAP = 0.55
"""Between two ranks; a row of compute is 1 high."""


class Bar(NamedTuple):
    """One rectangle: times in seconds since the start of the step, places in rows from the top.

    ``wide`` bars have room for a border; in narrow ones it would hide the colour.
    """

    kind: str
    start: float
    length: float
    middle: float
    height: float
    wide: bool
    label: str
    tip: tuple[str, ...]


class Drawing(NamedTuple):
    """The bars of one step, label and place of each rank, and a note of what was left out."""

    bars: tuple[Bar, ...]
    ranks: tuple[tuple[str, float], ...]
    height: float
    end: float
    note: str


def lay_out(run: RecordedRun, most_bars: int = MOST_BARS) -> Drawing:
    """The typical step of a run; of many ranks and of many exchanges only some.

    Example:
        >>> from slipstream.trace.event import Trace
        >>> trace = Trace((
        ...     Event("iteration", 0, 2, 0.0, 1.0),
        ...     Event("backward", 0, 2, 0.25, 0.75),
        ...     Event("allreduce1", 0, 2, 0.5, 1.0),
        ... ))
        >>> drawing = lay_out(RecordedRun.of("run", trace, predicted=False))
        >>> [(bar.kind, bar.start, bar.length) for bar in drawing.bars]
        [('backward', 0.25, 0.5), ('hidden', 0.5, 0.25), ('exposed', 0.75, 0.25)]
    """
    step = typical_step(run.iterations)
    by_rank = {iteration.rank: iteration for iteration in run.iterations if iteration.step == step}
    busiest = max(len(iteration.events) for iteration in by_rank.values())
    compute = {r: run.typical.ranks[r].forward + run.typical.ranks[r].backward for r in by_rank}
    ranks = chosen_ranks(compute, max(3, min(MOST_RANKS, most_bars // max(busiest, 1))))
    zero = min(by_rank[rank].start for rank in ranks)
    end = max(by_rank[rank].end for rank in ranks) - zero
    frame = _Frame(run.meta, zero, chart_unit(end), most_bars // len(ranks), blur=end / 400)
    bars: list[Bar] = []
    labels, top = [], 0.0
    for rank in ranks:
        of_rank, height = frame.rank(by_rank[rank], top)
        bars += of_rank
        labels.append((_label(rank, compute, run.meta), top + height / 2))
        top += height + _GAP
    steps = len({iteration.step for iteration in run.iterations})
    note = f"Step {step}" + (f", the nearest to the median of {steps} steps." * (steps > 1) or ".")
    world = max(len(compute), run.meta.get("world_size") or 0)  # a simulated trace may hold fewer
    if len(ranks) < world:
        note += (
            f" {len(ranks)} of {world:,} ranks: the first, and evenly from the fastest in compute "
            "to the slowest."
        )
    if busiest > frame.most:
        note += f" Of each rank the {frame.most:,} longest exchanges."
    return Drawing(tuple(bars), tuple(labels), top - _GAP, end, note)


def typical_step(iterations: Sequence[Iteration]) -> int:
    """Choose, of the steps that most ranks recorded, one whose slowest rank is nearest to the
    median.

    Example:
        >>> typical_step([Iteration(0, step, 0, end, ()) for step, end in ((2, 5), (3, 9), (4, 6))])
        4
    """
    durations: dict[int, list[float]] = defaultdict(list)
    for iteration in iterations:
        durations[iteration.step].append(iteration.duration)
    most = max(map(len, durations.values()))
    slowest = {step: max(times) for step, times in durations.items() if len(times) == most}
    usual = median(slowest.values())
    return min(slowest, key=lambda step: abs(slowest[step] - usual))


def chosen_ranks(seconds: Mapping[int, float], most: int) -> list[int]:
    """All ranks, or at most ``most >= 3``: the first, and evenly from the fastest to the slowest.

    Example:
        >>> chosen_ranks({rank: rank % 100 for rank in range(1000)}, 4)
        [0, 333, 666, 999]
        >>> chosen_ranks({7: 1.0, 3: 2.0}, 4)
        [3, 7]
    """
    if len(seconds) <= most:
        return sorted(seconds)
    ordered, first = sorted(seconds, key=lambda rank: (seconds[rank], rank)), min(seconds)
    for count in (most, most - 1):
        step = (len(ordered) - 1) / (count - 1)
        chosen = {ordered[round(i * step)] for i in range(count)}
        if first in chosen:
            break
    return sorted(chosen | {first})


class _Frame(NamedTuple):
    """Coordinates that the bars of all ranks share.

    ``most`` bounds the exchanges drawn of a rank. Two bars of a row may overlap by ``blur``
    seconds, which is less than a pixel or two.
    """

    meta: Mapping[str, Any]
    zero: float
    unit: TimeUnit
    most: int
    blur: float

    def rank(self, iteration: Iteration, top: float) -> tuple[list[Bar], float]:
        """The bars of one rank and their total height: a row of compute, then exchanges.

        Up to two rows of exchanges are as high as compute; more share the height of two.
        """
        bars = []
        for event in iteration.events:
            if event.name in _COMPUTE and event.duration > 0:
                label, span = PALETTE[event.name].name, (event.start, event.end)
                tip = self._tip(label, event)
                bars.append(self._bar(event.name, span, (top + 0.5, 1.0), label, tip))
        longest = nlargest(
            self.most, [*iteration.exchanges, *iteration.meetings], attrgetter("duration")
        )
        exchanges = sorted(longest, key=attrgetter("start"))
        # Exchanges that overlap by less than the eye can see share a row: else each pair of
        # neighbours, which clocks let overlap by microseconds, would need two.
        lane_of = lanes([(e.start, max(e.start, e.end - self.blur)) for e in exchanges])
        rows = max(lane_of, default=-1) + 1
        height = min(rows, 2) / max(rows, 1)
        compute = iteration.compute
        for event, lane in zip(exchanges, lane_of, strict=True):
            bars += self._exchange(event, compute, (top + 1.0 + (lane + 0.5) * height, height))
        return bars, 1.0 + min(rows, 2)

    def _exchange(self, event: Event, compute: Intervals, place: Interval) -> Iterator[Bar]:
        """The pieces of an exchange with and without compute beside them; the longest is named."""
        whole = union([(event.start, event.end)])
        exposed = subtract(whole, compute)
        tip = (*self._tip(event.name, event), *self._exchange_tip(event, length(exposed)))
        pieces = [("hidden", piece) for piece in subtract(whole, exposed)]
        pieces += [("exposed", piece) for piece in exposed]
        longest = max((end - start for _, (start, end) in pieces), default=0.0)
        for kind, (start, end) in pieces:
            label = str(exchange_order(event.name) or event.name) if end - start == longest else ""
            yield self._bar(kind, (start, end), place, label, tip)

    def _bar(
        self, kind: str, span: Interval, place: Interval, label: str, tip: tuple[str, ...]
    ) -> Bar:
        (start, end), (middle, height) = span, place
        wide = end - start > self.blur
        return Bar(kind, start - self.zero, end - start, middle, height, wide, label, tip)

    def _tip(self, name: str, event: Event) -> tuple[str, ...]:
        when = f"from {self.unit(event.start - self.zero)}, for {self.unit(event.duration)}"
        return f"{name}, rank {event.rank}", when

    def _exchange_tip(self, event: Event, exposed: float) -> Iterator[str]:
        if module := event.args.get("module", ""):
            yield shortened(str(module), 40)
        yield f"{self.unit(event.duration - exposed)} hidden, {self.unit(exposed)} exposed"
        if num_bytes := event.args.get("bytes", 0):
            speed = f", {num_bytes * 8e-9 / event.duration:.2f} Gbit/s" if event.duration else ""
            yield f"{num_bytes / 1e6:.2f} MB{speed}"
        if count := event.args.get("gradients", 0):
            yield f"{count} gradient{'s' * (count != 1)}{self._names(event)}"
        if (waited := event.start - event.args.get("ready", event.start)) > 0:
            yield f"started {self.unit(waited)} after its gradients were ready"

    def _names(self, event: Event) -> str:
        """The first gradients of a segment, if the trace names them."""
        segments = self.meta.get("segments") or []
        index = (exchange_order(event.name) or 0) - 1
        if not 0 <= index < len(segments):
            return ""
        names = [str(name) for name in segments[index].get("gradients", [])]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f": {', '.join(shortened(name, 40) for name in names[:3])}{more}" if names else ""


def _label(rank: int, compute: Mapping[int, float], meta: Mapping[str, Any]) -> str:
    """The rank, whether it is the slowest or fastest of many, and below them its host."""
    words = f"rank {rank}"
    if len(compute) > MOST_RANKS and len(set(compute.values())) > 1:
        words += ", slowest" * (compute[rank] == max(compute.values()))
        words += ", fastest" * (compute[rank] == min(compute.values()))
    hosts = meta.get("hosts") or []
    return f"{words}\n{shortened(str(hosts[rank]), 18)}" if rank < len(hosts) else words
