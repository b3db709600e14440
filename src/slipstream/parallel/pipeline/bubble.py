"""The bubble of a pipeline: the share of its time in which a rank has nothing to compute.

Never measures: it reads the spans that a recorder took, and knows the formulas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from slipstream.errors import StrategyError, TraceError
from slipstream.parallel.pipeline.schedules import ScheduleName
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT, Event

_COMPUTE = (STAGE_FORWARD, STAGE_BACKWARD, STAGE_WEIGHT)


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
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.name in _COMPUTE:
            steps[event.step].append(event)
    if not steps:
        raise TraceError(
            "no span of a pipeline stage; give the events of a trace whose recorder was given to "
            "Pipeline(recorder=...)"
        )
    found: dict[int, list[float]] = defaultdict(list)
    for spans in steps.values():
        window = max(e.end for e in spans) - min(e.start for e in spans)
        for rank in sorted({e.rank for e in spans}):
            busy = sum(e.duration for e in spans if e.rank == rank)
            found[rank].append(1 - busy / window if window else 0.0)
    return {rank: median(shares) for rank, shares in sorted(found.items())}


def ideal_bubble(
    schedule: ScheduleName,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    *,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> float:
    """The bubble of a schedule where all stages take equally long and sending takes no time.

    With p ranks, m micro-batches and v stages a rank, each rank computes m (f + b + w) in all, and
    waits (p - 1)(f + b + w) under GPipe and 1F1B, a v-th of that where interleaved, and
    (p - 1)(f + b - w) / v under zero bubble (ZB-H1).

    Args:
        schedule: its name.
        ranks: p.
        micro_batches: m.
        stages_per_rank: v.
        forward: f, the time of a forward of all stages of a rank.
        inputs: b, of the part of backward for the inputs.
        weights: w, of the part for the parameters.

    Raises:
        StrategyError: a number below 1.

    Example:
        >>> ideal_bubble("1f1b", ranks=2, micro_batches=3)
        0.25
        >>> ideal_bubble("interleaved_1f1b", ranks=2, micro_batches=3, stages_per_rank=2)
        0.14285714285714285
        >>> ideal_bubble("zero_bubble", ranks=2, micro_batches=3)
        0.1

    Source: the papers named in ``schedules``.
    """
    if min(ranks, micro_batches, stages_per_rank) < 1:
        raise StrategyError(
            f"{ranks} ranks, {micro_batches} micro-batches and {stages_per_rank} stages a rank; "
            "allowed: 1 or more of each"
        )
    whole = forward + inputs + weights
    idle = (forward + inputs - weights) if schedule == "zero_bubble" else whole
    idle *= (ranks - 1) / (1 if schedule in ("gpipe", "1f1b") else stages_per_rank)
    return idle / (idle + micro_batches * whole)
