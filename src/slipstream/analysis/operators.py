"""Says what the operators of ``slipstream.comm`` cost an iteration: where a layer waits for others.

Never reads a file and never draws a table: iterations in, numbers out. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.trace.event import Event
from slipstream.trace.timeline import Iteration


@dataclass(frozen=True, slots=True)
class TypicalOperator:
    """Medians over iterations of the sums in one of them: of one operator, in groups of one size.

    ``seconds`` includes the wait for the other ranks of the group, which have so many ``ranks``.
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
    chosen = [one for one in iterations if rank is None or one.rank == rank]
    found: dict[tuple[str, int], list[list[Event]]] = defaultdict(list)
    for one in chosen:
        spans: dict[tuple[str, int], list[Event]] = defaultdict(list)
        for event in one.events:
            if "ranks" in event.args:
                spans[event.name, event.args["ranks"]].append(event)
        for key, own in spans.items():
            found[key].append(own)
    typical = [_typical(*key, every) for key, every in found.items()]
    return tuple(sorted(typical, key=lambda operator: -operator.seconds))


def _typical(name: str, ranks: int, every: Sequence[Sequence[Event]]) -> TypicalOperator:
    return TypicalOperator(
        name,
        ranks,
        calls=round(median(map(len, every))),
        bytes=round(median(sum(event.args["bytes"] for event in own) for own in every)),
        seconds=median(sum(event.duration for event in own) for own in every),
    )
