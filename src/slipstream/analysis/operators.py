"""Sums up what the operators of ``slipstream.comm`` cost an iteration.

Iterations in, numbers out. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from slipstream.trace.event import Event
from slipstream.trace.timeline import Iteration


class TypicalOperator(NamedTuple):
    """One operator in groups of ``ranks`` ranks: sums over an iteration, medians over iterations.

    ``seconds`` includes the wait for the other ranks of the group.
    """

    name: str
    ranks: int
    calls: int
    bytes: int
    seconds: float


def typical_operators(
    iterations: Iterable[Iteration], rank: int | None = None
) -> tuple[TypicalOperator, ...]:
    """The operators of these iterations, of ``rank`` alone if it is given; the longest come first.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", 0, 2, 0.0, 2.0)]
        >>> spans += [Event("all_gather", 0, 2, 0.0, 0.25, {"bytes": 8, "ranks": 2})] * 2
        >>> typical_operators(timeline(spans))
        (TypicalOperator(name='all_gather', ranks=2, calls=2, bytes=16, seconds=0.5),)
    """
    calls: dict[tuple[str, int], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for number, iteration in enumerate(iterations):
        if rank is None or iteration.rank == rank:
            for event in iteration.events:
                if "ranks" in event.args:
                    calls[event.name, event.args["ranks"]][number].append(event)
    operators = []
    for (name, ranks), by_iteration in calls.items():
        groups = by_iteration.values()
        count = round(median(map(len, groups)))
        num_bytes = round(median(sum(e.args["bytes"] for e in events) for events in groups))
        seconds = median(sum(e.duration for e in events) for events in groups)
        operators.append(TypicalOperator(name, ranks, count, num_bytes, seconds))
    return tuple(sorted(operators, key=lambda operator: -operator.seconds))
