"""Lays out one iteration of several ranks as bars: compute, and below it the exchanges.

Never draws: the page and the picture both draw what stands here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from slipstream.analysis.breakdown import Typical
from slipstream.report.look import LOOKS, Unit, shortened
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, Event, exchange_order
from slipstream.trace.intervals import Interval, Intervals, lanes, length, subtract, union
from slipstream.trace.timeline import Iteration

MOST_RANKS = 16
MOST_BARS = 6000
"""Spans that the timelines of one report draw, so that it stays quick to open."""

_COMPUTE = (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER)
_GAP = 0.55
"""Between two ranks; a row of compute is 1 high."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle; times in seconds from the start of the step, places in rows from the top.

    ``wide`` bars have room for a border, which in narrow ones would hide the colour.
    """

    kind: str
    start: float
    length: float
    middle: float
    height: float
    wide: bool
    label: str
    tip: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """The bars of one step, the label and the place of each rank, and what was left out."""

    bars: tuple[Bar, ...]
    ranks: tuple[tuple[str, float], ...]
    height: float
    end: float
    note: str


def lay_out(
    iterations: Sequence[Iteration],
    middle: Typical,
    meta: Mapping[str, Any],
    most_bars: int = MOST_BARS,
) -> Drawing:
    """The typical step of a trace; of many ranks and of many exchanges only some.

    Example:
        >>> from slipstream.analysis.breakdown import typical
        >>> from slipstream.trace.timeline import timeline
        >>> its = timeline([
        ...     Event("iteration", 0, 2, 0.0, 1.0),
        ...     Event("backward", 0, 2, 0.25, 0.75),
        ...     Event("allreduce1", 0, 2, 0.5, 1.0),
        ... ])
        >>> [(bar.kind, bar.start, bar.length) for bar in lay_out(its, typical(its), {}).bars]
        [('backward', 0.25, 0.5), ('hidden', 0.5, 0.25), ('exposed', 0.75, 0.25)]
    """
    step = typical_step(iterations)
    own = {iteration.rank: iteration for iteration in iterations if iteration.step == step}
    busiest = max(len(iteration.events) for iteration in own.values())
    compute = {r: middle.ranks[r].forward + middle.ranks[r].backward for r in own}
    ranks = chosen_ranks(compute, max(3, min(MOST_RANKS, most_bars // max(busiest, 1))))
    zero = min(own[rank].start for rank in ranks)
    end = max(own[rank].end for rank in ranks) - zero
    frame = _Frame(meta, zero, Unit.of(end), most_bars // len(ranks), blur=end / 400)
    bars: list[Bar] = []
    labels, top = [], 0.0
    for rank in ranks:
        drawn, height = frame.rank(own[rank], top)
        bars += drawn
        labels.append((_label(rank, compute, meta), top + height / 2))
        top += height + _GAP
    steps = len({iteration.step for iteration in iterations})
    whole = max(len(compute), meta.get("world_size") or 0)  # a simulated trace may hold few ranks
    note = _note(step, steps, len(ranks), whole, frame.most if busiest > frame.most else 0)
    return Drawing(tuple(bars), tuple(labels), top - _GAP, end, note)


def typical_step(iterations: Sequence[Iteration]) -> int:
    """Of the steps that most ranks have: the one whose slowest rank is nearest to the median.

    Example:
        >>> typical_step([Iteration(0, step, 0, end, ()) for step, end in ((2, 5), (3, 9), (4, 6))])
        4
    """
    durations: dict[int, list[float]] = defaultdict(list)
    for iteration in iterations:
        durations[iteration.step].append(iteration.duration)
    most = max(map(len, durations.values()))
    slowest = {step: max(own) for step, own in durations.items() if len(own) == most}
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
    ordered = sorted(seconds, key=lambda rank: (seconds[rank], rank))

    def evenly(count: int) -> set[int]:
        return {ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)}

    chosen = evenly(most)
    return sorted(chosen if min(seconds) in chosen else evenly(most - 1) | {min(seconds)})


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the bars of all ranks share.

    ``most`` is how many exchanges of a rank are drawn. Within ``blur`` seconds, which nobody can
    see, two of one row may overlap.
    """

    meta: Mapping[str, Any]
    zero: float
    unit: Unit
    most: int
    blur: float

    def rank(self, iteration: Iteration, top: float) -> tuple[list[Bar], float]:
        """The bars of one rank and how high they are: a row of compute, then exchanges.

        Up to two rows of exchanges are as high as compute; more share the height of two.
        """
        bars = [
            self._bar(event, event.name, (event.start, event.end), top + 0.5, 1.0)
            for event in iteration.events
            if event.name in _COMPUTE and event.duration > 0
        ]
        exchanges = _longest(iteration.exchanges, self.most)
        placed = lanes([(e.start, max(e.start, e.end - self.blur)) for e in exchanges])
        rows = max(placed, default=-1) + 1
        each = min(rows, 2) / max(rows, 1)
        compute = iteration.compute
        for event, lane in zip(exchanges, placed, strict=True):
            bars += self._exchange(event, compute, top + 1.0 + (lane + 0.5) * each, each)
        return bars, 1.0 + min(rows, 2)

    def _exchange(
        self, event: Event, compute: Intervals, middle: float, height: float
    ) -> Iterator[Bar]:
        """The pieces of an exchange with and without compute beside them; the longest is named."""
        whole = union([(event.start, event.end)])
        exposed = subtract(whole, compute)
        tip = self._tip(event, length(exposed))
        pieces = [("hidden", piece) for piece in subtract(whole, exposed)]
        pieces += [("exposed", piece) for piece in exposed]
        longest = max((end - start for _, (start, end) in pieces), default=0.0)
        for kind, (start, end) in pieces:
            bar = self._bar(event, kind, (start, end), middle, height, tip)
            named = str(exchange_order(event.name) or event.name) if end - start == longest else ""
            yield replace(bar, label=named)

    def _bar(
        self,
        event: Event,
        kind: str,
        span: Interval,
        middle: float,
        height: float,
        tip: tuple[str, ...] = (),
    ) -> Bar:
        start, end = span
        name = LOOKS[kind].name
        what = event.name if tip else name
        when = f"from {self.unit(event.start - self.zero)}, for {self.unit(event.duration)}"
        head = f"{what}, rank {event.rank}"
        length, wide = end - start, end - start > self.blur
        lines = (head, when, *tip)
        return Bar(kind, start - self.zero, length, middle, height, wide, name, lines)

    def _tip(self, event: Event, exposed: float) -> tuple[str, ...]:
        """What an exchange is asked for when it is pointed at."""
        lines = [f"{self.unit(event.duration - exposed)} hidden, {self.unit(exposed)} exposed"]
        if num_bytes := event.args.get("bytes", 0):
            speed = f", {num_bytes * 8e-9 / event.duration:.2f} Gbit/s" if event.duration else ""
            lines.append(f"{num_bytes / 1e6:.2f} MB{speed}")
        if count := event.args.get("gradients", 0):
            lines.append(f"{count} gradient{'s' * (count != 1)}{self._names(event)}")
        if (waited := event.start - event.args.get("ready", event.start)) > 0:
            lines.append(f"started {self.unit(waited)} after its gradients were ready")
        return tuple(lines)

    def _names(self, event: Event) -> str:
        """The first gradients of a segment, if the trace names them."""
        segments = self.meta.get("segments") or []
        index = (exchange_order(event.name) or 0) - 1
        if not 0 <= index < len(segments):
            return ""
        names = [str(name) for name in segments[index].get("gradients", [])]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f": {', '.join(shortened(name, 40) for name in names[:3])}{more}" if names else ""


def _longest(exchanges: Sequence[Event], most: int) -> list[Event]:
    """The ``most`` longest, in the order they came."""
    by_duration = sorted(range(len(exchanges)), key=lambda i: -exchanges[i].duration)
    return [exchanges[i] for i in sorted(by_duration[:most])]


def _label(rank: int, compute: Mapping[int, float], meta: Mapping[str, Any]) -> str:
    """Rank, whether it computes the longest or the shortest of many, and below them its host."""
    words = f"rank {rank}"
    if len(compute) > MOST_RANKS and len(set(compute.values())) > 1:
        words += ", slowest" * (compute[rank] == max(compute.values()))
        words += ", fastest" * (compute[rank] == min(compute.values()))
    hosts = meta.get("hosts") or []
    return f"{words}\n{shortened(str(hosts[rank]), 18)}" if rank < len(hosts) else words


def _note(step: int, steps: int, ranks: int, of_ranks: int, most_exchanges: int) -> str:
    """Which step is shown, and what was left out of it."""
    words = f"Step {step}"
    words += f", the nearest to the median of {steps} steps." if steps > 1 else "."
    if ranks < of_ranks:
        words += (
            f" {ranks} of {of_ranks:,} ranks: the first, and evenly from the fastest in compute to "
            "the slowest."
        )
    if most_exchanges:
        words += f" Of each rank the {most_exchanges:,} longest exchanges."
    return words
