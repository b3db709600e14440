"""Reduces a trace to the exchanges of one typical iteration, as the last rank sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from statistics import median, median_low
from typing import NamedTuple

from slipstream.analysis.stragglers import median_of_others
from slipstream.errors import TraceError
from slipstream.trace.event import BACKWARD, Event, exchange_order
from slipstream.trace.intervals import Interval, length, subtract, union
from slipstream.trace.timeline import Iteration

RanksOfStep = Mapping[int, Iteration]
"""The iterations of one step, by rank."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Medians over steps, in seconds since the first rank started the backward that exchanges.

    Attributes:
        cuts: The traced split.
        num_bytes: Of each segment.
        spans: When each segment was exchanged: from the last rank's start to the last rank's end.
        backward: When the last rank ends backward.
        skew: Seconds between the first and the last rank having all gradients.
        lag: Seconds between the median and the last rank having all gradients.
        late: By rank, how much later than the median of the others it has all gradients, the lower
            median; empty of one rank.
        ready: When the last rank has each gradient and all before it, in ready order; empty if the
            gradients' sizes are unknown.
    """

    cuts: tuple[int, ...]
    num_bytes: tuple[int, ...]
    spans: tuple[Interval, ...]
    backward: float
    skew: float
    lag: float
    late: Mapping[int, float]
    ready: tuple[float, ...]

    @property
    def tail(self) -> float:
        """Seconds from the end of backward to the end of the last exchange."""
        return max(0.0, max(end for _, end in self.spans) - self.backward)

    @property
    def busy(self) -> float:
        """Seconds in which any exchange ran."""
        return length(union(self.spans))

    @property
    def idle(self) -> float:
        """Seconds of backward in which a ready gradient waited and no exchange ran."""
        if not self.ready:
            return 0.0
        ready = [self.ready[start] for start in (0, *self.cuts[:-1])]
        until = [min(start, self.backward) for start, _ in self.spans]
        return length(subtract(union(zip(ready, until, strict=True)), union(self.spans)))


def typical_exchanges(steps: Sequence[RanksOfStep], sizes: Sequence[int]) -> Exchanges | None:
    """The exchanges of steps with one layout; None if nothing was exchanged.

    Args:
        steps: Each with all ranks.
        sizes: Bytes of each gradient in ready order; empty if unknown.
    """
    layout = layout_of(steps[0])
    measured = [_measure(step, sizes) for step in steps if all(map(_backward, step.values()))]
    if not layout or not measured:
        return None
    cuts = tuple(accumulate(layout))
    spans = tuple(
        (median(start for start, _ in spans), median(end for _, end in spans))
        for spans in zip(*(one.spans for one in measured), strict=True)
    )
    segments = _segments(next(iter(steps[0].values())))
    num_bytes = tuple(sum(event.args.get("bytes", 0) for event in events) for events in segments)
    ready: tuple[float, ...] = ()
    if len(sizes) == cuts[-1]:
        times = zip(*(one.ready for one in measured), strict=True)
        ready = tuple(accumulate(map(median, times), max))
    backward = median(one.backward for one in measured)
    skew = median(max(one.all_ready) - min(one.all_ready) for one in measured)
    lag = median(max(one.all_ready) - median(one.all_ready) for one in measured)
    return Exchanges(cuts, num_bytes, spans, backward, skew, lag, _late(measured), ready)


def layout_of(step: RanksOfStep) -> tuple[int, ...]:
    """Count the gradients of each segment.

    Raises:
        TraceError: Ranks disagree.
    """
    (first_rank, first), *others = ((rank, _layout(one)) for rank, one in step.items())
    for rank, layout in others:
        if layout != first:
            raise TraceError(
                f"ranks disagree in step {step[rank].step}: rank {first_rank} exchanged segments "
                f"of {list(first)} gradients, rank {rank} of {list(layout)}. These are different "
                "runs: give the trace of one run, or record it again."
            )
    return first


class _Measured(NamedTuple):
    """One step, in seconds since the first rank's start of backward.

    ``all_ready`` is by rank, of ``ranks``, ``ready`` by gradient (on the last rank).
    """

    spans: list[Interval]
    backward: float
    ranks: list[int]
    all_ready: list[float]
    ready: list[float]


def _measure(step: RanksOfStep, sizes: Sequence[int]) -> _Measured:
    backwards = {rank: _backward(iteration) for rank, iteration in step.items()}
    zero = min(backward.start for backward in backwards.values() if backward)
    by_rank = [_segments(iteration) for iteration in step.values()]
    spans = []
    for of_ranks in zip(*by_rank, strict=True):
        # A rank that starts early only waits: the data moves once the last rank has started.
        start = max(min(event.start for event in events) for events in of_ranks)
        end = max(event.end for event in chain(*of_ranks))
        spans.append((min(start, end) - zero, end - zero))
    ready = [_ready(step[rank], b, sizes) for rank, b in backwards.items() if b and sizes]
    return _Measured(
        spans,
        max(backward.end for backward in backwards.values() if backward) - zero,
        [rank for rank, segments in zip(step, by_rank, strict=True) if segments],
        [max(map(_ready_of, segments[-1])) - zero for segments in by_rank if segments],
        [max(times) - zero for times in zip(*ready, strict=True)],
    )


def _late(measured: Sequence[_Measured]) -> dict[int, float]:
    """By rank, how much later than the median of the others it has all gradients."""
    late: dict[int, list[float]] = defaultdict(list)
    for one in measured:
        ordered = sorted(one.all_ready)
        for rank, ready in zip(one.ranks, one.all_ready, strict=True) if ordered[1:] else ():
            late[rank].append(ready - median_of_others(ordered, ready))
    return {rank: median_low(seconds) for rank, seconds in late.items()}


def _backward(iteration: Iteration) -> Event | None:
    """The backward that exchanges: the last one of an accumulation window."""
    backwards = (event for event in iteration.events if event.name == BACKWARD)
    return max(backwards, key=lambda event: event.end, default=None)


def _segments(iteration: Iteration) -> list[list[Event]]:
    """The exchanges of each segment: one for each dtype in it."""
    by_order = groupby(iteration.exchanges, lambda event: exchange_order(event.name))
    return [list(events) for order, events in by_order if order]  # 0: buffers


def _layout(iteration: Iteration) -> tuple[int, ...]:
    return tuple(events[0].args.get("gradients", 0) for events in _segments(iteration))


def _ready_of(event: Event) -> float:
    """When the segment was full, or, if that is unknown, when its exchange started."""
    return float(event.args.get("ready", event.start))


def _ready(iteration: Iteration, backward: Event, sizes: Sequence[int]) -> list[float]:
    """When each gradient was ready; one without a value in this step goes when backward ends."""
    offsets = backward.args.get("gradients_ready") or ()
    if len(offsets) == len(sizes):
        return [backward.end if o is None else backward.start + o for o in offsets]
    return list(_interpolated(iteration, backward.start, sizes))


def _interpolated(iteration: Iteration, start: float, sizes: Sequence[int]) -> Iterator[float]:
    """Ready times by bytes, between the times at which segments were full."""
    done = 0
    for events in _segments(iteration):
        full = max(start, max(map(_ready_of, events)))
        count = events[0].args.get("gradients", 0)
        of_segment = sizes[done : done + count]
        total = sum(of_segment)
        for filled in accumulate(of_segment):
            yield start + (full - start) * (filled / total if total else 1)
        start, done = full, done + count
