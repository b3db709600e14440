"""Says how the ranks of a pipeline spend their time: computing stages, or waiting for each other.

Never reads a file and never draws a table: events in, numbers out. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.errors import TraceError
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT, Event
from slipstream.trace.timeline import Iteration

_COMPUTE = (STAGE_FORWARD, STAGE_BACKWARD, STAGE_WEIGHT)


@dataclass(frozen=True, slots=True)
class TypicalStages:
    """What a rank of a pipeline does in a step, in medians.

    Attributes:
        rank: of the world.
        stages: those that it runs.
        micro_batches: that each of them gets.
        forward: seconds of all its forwards.
        backward: seconds of all its backwards.
        waits: seconds between the first forward and the last backward of any rank in which it
            computes nothing.
        bubble: their share of that window.
    """

    rank: int
    stages: tuple[int, ...]
    micro_batches: int
    forward: float
    backward: float
    waits: float
    bubble: float


def typical_stages(
    iterations: Iterable[Iteration], rank: int | None = None
) -> tuple[TypicalStages, ...]:
    """The ranks that run stages, or ``rank`` alone; none where there is no pipeline.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", 0, 2, 0.0, 9.0), Event("stage_forward", 0, 2, 1.0, 2.0)]
        >>> spans += [Event("stage_backward", 0, 2, 3.0, 5.0)]
        >>> [stage] = typical_stages(timeline(spans))
        >>> stage.forward, stage.backward, stage.waits, stage.bubble
        (1.0, 2.0, 1.0, 0.25)
    """
    steps: dict[int, dict[int, list[Event]]] = defaultdict(dict)
    for one in iterations:
        if own := [e for e in one.events if e.name in _COMPUTE]:
            steps[one.step][one.rank] = own
    found: dict[int, list[TypicalStages]] = defaultdict(list)
    for ranks in steps.values():
        every = [event for own in ranks.values() for event in own]
        window = max(e.end for e in every) - min(e.start for e in every)
        for number, own in ranks.items():
            found[number].append(_of_step(number, own, window))
    chosen = sorted(found) if rank is None else [rank] if rank in found else []
    return tuple(_typical(found[number]) for number in chosen)


def measured_bubble(events: Iterable[Event]) -> dict[int, float]:
    """By rank, 1 - busy / window; the median of its steps.

    The window of a step goes from the first forward to the end of the last backward of any rank;
    busy is what the rank computed in it.

    Raises:
        TraceError: no span of a stage.

    Example:
        >>> spans = [(0, 0.0, 1.0), (1, 1.0, 3.0), (0, 3.0, 4.0)]
        >>> measured_bubble(Event("stage_forward", rank, 0, a, b) for rank, a, b in spans)
        {0: 0.5, 1: 0.5}
    """
    steps: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.name in _COMPUTE:
            steps[event.step, event.rank].append(event)
    if not steps:
        raise TraceError(
            "no span of a pipeline stage; give the events of a trace whose recorder was given to "
            "Pipeline(recorder=...)"
        )
    alone = [Iteration(rank, step, 0.0, 0.0, tuple(own)) for (step, rank), own in steps.items()]
    return {found.rank: found.bubble for found in typical_stages(alone)}


def _of_step(rank: int, own: Sequence[Event], window: float) -> TypicalStages:
    forward = sum(e.duration for e in own if e.name == STAGE_FORWARD)
    busy = sum(e.duration for e in own)
    return TypicalStages(
        rank,
        tuple(sorted({e.args.get("stage", 0) for e in own})),
        len({e.args.get("micro_batch", 0) for e in own}),
        forward,
        busy - forward,
        window - busy,
        1 - busy / window if window else 0.0,
    )


def _typical(steps: Sequence[TypicalStages]) -> TypicalStages:
    first = steps[0]
    return TypicalStages(
        first.rank,
        first.stages,
        first.micro_batches,
        forward=median(s.forward for s in steps),
        backward=median(s.backward for s in steps),
        waits=median(s.waits for s in steps),
        bubble=median(s.bubble for s in steps),
    )
