"""Splits the time of a pipeline's ranks into computing stages and waiting for each other.

Events in, numbers out. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from slipstream.errors import TraceError
from slipstream.trace.event import STAGE_FORWARD, STAGE_SPANS, Event
from slipstream.trace.timeline import Iteration


class TypicalStages(NamedTuple):
    """A rank of a pipeline in a typical step: medians over steps.

    Attributes:
        rank: Of the world.
        stages: The stages it runs.
        micro_batches: How many each of them gets.
        forward: Seconds of all its forwards.
        backward: Seconds of all its backwards.
        waits: Seconds in which it computes nothing, between the first forward and the last backward
            of any rank.
        bubble: Share of that window in which it computes nothing.
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
    """The ranks that run stages, or ``rank`` alone; empty without a pipeline.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", 0, 2, 0.0, 9.0), Event("stage_forward", 0, 2, 1.0, 2.0)]
        >>> spans += [Event("stage_backward", 0, 2, 3.0, 5.0)]
        >>> [stage] = typical_stages(timeline(spans))
        >>> stage.forward, stage.backward, stage.waits, stage.bubble
        (1.0, 2.0, 1.0, 0.25)
    """
    by_rank = _by_rank(event for iteration in iterations for event in iteration.events)
    chosen = sorted(by_rank) if rank is None else [rank] if rank in by_rank else []
    return tuple(_median(by_rank[number]) for number in chosen)


def measured_bubble(events: Iterable[Event]) -> dict[int, float]:
    """The idle share of each rank, 1 - busy / window; the median of its steps.

    The window of a step lasts from the first forward to the end of the last backward of any rank;
    busy is the time in which the rank computed.

    Raises:
        TraceError: There is no span of a stage.

    Example:
        >>> spans = [(0, 0.0, 1.0), (1, 1.0, 3.0), (0, 3.0, 4.0)]
        >>> measured_bubble(Event("stage_forward", rank, 0, a, b) for rank, a, b in spans)
        {0: 0.5, 1: 0.5}
    """
    by_rank = _by_rank(events)
    if not by_rank:
        raise TraceError(
            "no span of a pipeline stage; give the events of a trace whose recorder was given to "
            "Pipeline(recorder=...)"
        )
    return {rank: _median(steps).bubble for rank, steps in sorted(by_rank.items())}


def _by_rank(events: Iterable[Event]) -> dict[int, list[TypicalStages]]:
    """Each step of each rank that runs stages."""
    steps: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.name in STAGE_SPANS:
            steps[event.step][event.rank].append(event)
    by_rank: dict[int, list[TypicalStages]] = defaultdict(list)
    for ranks in steps.values():
        of_all = [event for of_rank in ranks.values() for event in of_rank]
        window = max(e.end for e in of_all) - min(e.start for e in of_all)
        for rank, of_rank in ranks.items():
            stages = sorted({e.args.get("stage", 0) for e in of_rank})
            micro_batches = len({e.args.get("micro_batch", 0) for e in of_rank})
            forward = sum(e.duration for e in of_rank if e.name == STAGE_FORWARD)
            busy = sum(e.duration for e in of_rank)
            times = {"forward": forward, "backward": busy - forward, "waits": window - busy}
            bubble = 1 - busy / window if window else 0.0
            step = TypicalStages(rank, tuple(stages), micro_batches, **times, bubble=bubble)
            by_rank[rank].append(step)
    return by_rank


def _median(steps: Sequence[TypicalStages]) -> TypicalStages:
    fields = ("forward", "backward", "waits", "bubble")
    middle = {field: median(getattr(step, field) for step in steps) for field in fields}
    return steps[0]._replace(**middle)
