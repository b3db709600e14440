"""The exchanges of the typical iteration as the last rank sees them, and the model made of them.

Never judges: the advisor's rules do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from statistics import median

from slipstream.advisor.splits import MOST, Cost, Cuts, Queue, fit, shares
from slipstream.errors import TraceError
from slipstream.trace.event import BACKWARD, Event, exchange_order
from slipstream.trace.intervals import Interval, length, subtract, union
from slipstream.trace.timeline import Iteration

Step = Mapping[int, Iteration]
"""The iterations of one step by rank."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Medians over steps, in seconds from when the first rank starts the backward that exchanges.

    Attributes:
        cuts: the split that was traced.
        num_bytes: of each segment.
        spans: when each segment moved, from the last rank's start to the last rank's end.
        backward: when the last rank ends backward.
        skew: from the first to the last rank's having all gradients.
        lag: from the median to the last rank's having all gradients.
        seconds_of: the cost of an exchange.
        queue: the model of this network; None where the gradients' sizes are not known.
        wanted: the split that the model prefers: of as many segments as now, if that is as good as
            any but for less than what is worthwhile; of no more, if the trace does not tell what a
            small exchange costs.
    """

    cuts: Cuts
    num_bytes: tuple[int, ...]
    spans: tuple[Interval, ...]
    backward: float
    skew: float
    lag: float
    seconds_of: Cost
    queue: Queue | None
    wanted: Cuts

    @property
    def tail(self) -> float:
        """Seconds from the end of backward to the end of the last exchange."""
        return max(0.0, max(end for _, end in self.spans) - self.backward)

    @property
    def busy(self) -> float:
        """Seconds in which anything moved."""
        return length(union(self.spans))

    @property
    def gain(self) -> float:
        """Seconds by which ``wanted`` ends sooner than the split that was traced, in the model."""
        if self.queue is None:
            return 0.0
        return min(self.tail, self.queue.finish(self.cuts) - self.queue.finish(self.wanted))

    @property
    def idle(self) -> float:
        """Seconds of backward in which a gradient was there, not sent, and nothing moved."""
        if self.queue is None:
            return 0.0
        ready = [self.queue.ready[start] for start in (0, *self.cuts[:-1])]
        until = [min(start, self.backward) for start, _ in self.spans]
        return length(subtract(union(zip(ready, until, strict=True)), union(self.spans)))

    def sizes_of(self, cuts: Cuts) -> list[int]:
        """Bytes of the segments of a split; none where the gradients' sizes are not known."""
        return self.queue.sizes_of(cuts) if self.queue else []


def exchanges(
    steps: Sequence[Step], sizes: Sequence[int], seconds_of: Cost | None, worthwhile: float
) -> Exchanges | None:
    """The exchanges of steps of one layout; None where nothing was exchanged.

    Args:
        steps: all ranks of each.
        sizes: bytes of each gradient in ready order; empty where they are not known.
        seconds_of: the cost of an exchange; None: a line through the exchanges themselves.
        worthwhile: the gain in seconds from which on a split of another length is wanted.
    """
    layout = layout_of(steps[0])
    seen = [_seen(step, sizes) for step in steps if all(map(_backward, step.values()))]
    if not layout or not seen:
        return None
    cuts = tuple(accumulate(layout))
    spans = tuple(
        (median(start for start, _ in spans), median(end for _, end in spans))
        for spans in zip(*(one.spans for one in seen), strict=True)
    )
    num_bytes = _bytes_of(next(iter(steps[0].values())))
    cost = _remembered(seconds_of or fit(num_bytes, shares(spans)))
    queue, wanted = None, cuts
    if sizes and len(sizes) == cuts[-1]:
        ready = [median(times) for times in zip(*(one.ready for one in seen), strict=True)]
        queue = Queue.of(ready, sizes, cost)
        most = MOST if seconds_of or _tell_startup(num_bytes) else max(2, len(cuts))
        wanted = _wanted(queue, len(cuts), min(most, MOST), worthwhile)
    return Exchanges(
        cuts=cuts,
        num_bytes=num_bytes,
        spans=spans,
        backward=median(one.backward for one in seen),
        skew=median(max(one.whole) - min(one.whole) for one in seen),
        lag=median(max(one.whole) - median(one.whole) for one in seen),
        seconds_of=cost,
        queue=queue,
        wanted=wanted,
    )


def layout_of(step: Step) -> tuple[int, ...]:
    """How many gradients each segment has.

    Raises:
        TraceError: ranks disagree.
    """
    layouts = {rank: _layout(iteration) for rank, iteration in step.items()}
    first_rank, first = next(iter(layouts.items()))
    for rank, layout in layouts.items():
        if layout != first:
            raise TraceError(
                f"ranks disagree in step {step[rank].step}: rank {first_rank} exchanged segments "
                f"of {list(first)} gradients, rank {rank} of {list(layout)}. This cannot be one "
                "run: give the trace of one run, or record it again."
            )
    return first


@dataclass(frozen=True, slots=True)
class _Seen:
    """What ``Exchanges`` is the median of; ``whole`` by rank: when all gradients were there."""

    spans: list[Interval]
    backward: float
    whole: list[float]
    ready: list[float]


def _seen(step: Step, sizes: Sequence[int]) -> _Seen:
    """One step; all times count from the first rank's start of backward."""
    backwards = {rank: _backward(iteration) for rank, iteration in step.items()}
    zero = min(backward.start for backward in backwards.values() if backward)
    by_rank = [_segments(iteration) for iteration in step.values()]
    spans = []
    for of_ranks in zip(*by_rank, strict=True):
        start = max(min(event.start for event in events) for events in of_ranks)
        end = max(event.end for event in chain(*of_ranks))
        spans.append((min(start, end) - zero, end - zero))
    ready = [_ready(step[rank], b, sizes) for rank, b in backwards.items() if b and sizes]
    return _Seen(
        spans,
        max(backward.end for backward in backwards.values() if backward) - zero,
        [max(map(_ready_of, segments[-1])) - zero for segments in by_rank if segments],
        [max(times) - zero for times in zip(*ready, strict=True)],
    )


def _backward(iteration: Iteration) -> Event | None:
    """The backward that exchanges: the last one of an accumulation window."""
    return max((e for e in iteration.events if e.name == BACKWARD), key=_end, default=None)


def _end(event: Event) -> float:
    return event.end


def _segments(iteration: Iteration) -> list[list[Event]]:
    """The exchanges of each segment, one for each dtype."""
    found: dict[int, list[Event]] = {}
    for event in iteration.exchanges:
        if order := exchange_order(event.name):
            found.setdefault(order, []).append(event)
    return [found[order] for order in sorted(found)]


def _layout(iteration: Iteration) -> tuple[int, ...]:
    return tuple(events[0].args.get("gradients", 0) for events in _segments(iteration))


def _bytes_of(iteration: Iteration) -> tuple[int, ...]:
    return tuple(sum(e.args.get("bytes", 0) for e in events) for events in _segments(iteration))


def _ready_of(event: Event) -> float:
    """When the segment was full, or, where that is not known, on its way."""
    return float(event.args.get("ready", event.start))


def _ready(iteration: Iteration, backward: Event, sizes: Sequence[int]) -> list[float]:
    """When each gradient was there; one that never came is sent when backward ends."""
    offsets = backward.args.get("gradients_ready") or ()
    if len(offsets) == len(sizes):
        return [backward.end if o is None else backward.start + o for o in offsets]
    return list(_interpolated(iteration, backward.start, sizes))


def _interpolated(iteration: Iteration, start: float, sizes: Sequence[int]) -> Iterator[float]:
    """Times by bytes, between those at which segments were full."""
    done = 0
    for events in _segments(iteration):
        full = max(start, max(map(_ready_of, events)))
        count = events[0].args.get("gradients", 0)
        of_segment = sizes[done : done + count]
        total = sum(of_segment)
        for filled in accumulate(of_segment):
            yield start + (full - start) * (filled / total if total else 1)
        start, done = full, done + count


def _remembered(seconds_of: Cost) -> Cost:
    """The cost, looked up once a size; a curve may end at 1 byte, sparse gradients count 0."""

    @cache
    def cost(size: float) -> float:
        return seconds_of(max(size, 1))

    return cost


def _tell_startup(num_bytes: Sequence[int]) -> bool:
    """Whether exchanges differ enough for a line through them to say what small ones cost.

    If not, the line starts at zero, and would have gradients cut ever smaller.
    """
    return max(num_bytes) >= 2 * min(num_bytes)


def _wanted(queue: Queue, count: int, most: int, worthwhile: float) -> Cuts:
    splits = queue.splits(most)
    same, best = min(splits[:count], key=queue.finish), splits[-1]
    return same if queue.finish(same) - queue.finish(best) < worthwhile else best
