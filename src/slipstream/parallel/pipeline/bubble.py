"""The bubble of a pipeline by its formula: the share of its time in which a rank must wait.

What a trace shows of it is ``trace.stages``.
"""

from __future__ import annotations

from slipstream.errors import StrategyError
from slipstream.parallel.pipeline.schedules import ScheduleName


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
