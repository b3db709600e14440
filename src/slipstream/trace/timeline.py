"""Groups the events of a trace into iterations: one for each step of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from slipstream.errors import TraceError
from slipstream.trace.event import BACKWARD, FORWARD, ITERATION, Event, exchange_order, is_meeting
from slipstream.trace.intervals import Intervals, union


class Iteration(NamedTuple):
    """One step of one rank: its bounds in seconds, and its spans ordered by start.

    ``samples`` is how many samples it trained on (its share, if several ranks hold one model); 0 if
    unknown.
    """

    rank: int
    step: int
    start: float
    end: float
    events: tuple[Event, ...]
    samples: float = 0

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    @property
    def exchanges(self) -> tuple[Event, ...]:
        """The exchanges: buffers first, then the segments in order."""
        exchanges = (e for e in self.events if exchange_order(e.name) is not None)
        return tuple(sorted(exchanges, key=lambda e: (exchange_order(e.name) or 0, e.start)))

    @property
    def meetings(self) -> tuple[Event, ...]:
        """The exchanges of meetings, or their parts in this iteration, by start."""
        return tuple(e for e in self.events if is_meeting(e.name))

    @property
    def compute(self) -> Intervals:
        """When forward or backward ran."""
        return self.during(FORWARD, BACKWARD)

    def during(self, *names: str) -> Intervals:
        """When any span of these names ran."""
        return union((e.start, e.end) for e in self.events if e.name in names)


def timeline(events: Iterable[Event]) -> list[Iteration]:
    """The iterations, ordered by step, then rank; a step that did not end is omitted.

    Raises:
        TraceError: There is no iteration.

    Example:
        >>> spans = [Event("iteration", 0, 2, 0.0, 3.0), Event("forward", 0, 2, 0.5, 2.0)]
        >>> [iteration] = timeline(spans)
        >>> iteration.duration, iteration.compute
        (3.0, ((0.5, 2.0),))
    """
    bounds: dict[tuple[int, int], Event] = {}
    inside: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.name == ITERATION:
            bounds[event.step, event.rank] = event
        else:
            inside[event.step, event.rank].append(event)
    if not bounds:
        raise TraceError(
            f"the trace holds no iteration ({sum(map(len, inside.values()))} other events). "
            "Record at least one whole step: set trace.steps in the strategy to steps that the "
            "training reaches."
        )
    iterations = []
    for (step, rank), span in sorted(bounds.items(), key=itemgetter(0)):
        spans = tuple(sorted(inside[step, rank], key=lambda e: (e.start, e.end)))
        samples = span.args.get("samples", 0)
        iterations.append(Iteration(rank, step, span.start, span.end, spans, samples))
    return iterations
