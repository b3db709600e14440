"""Computes how fast the ranks of a trace train: samples a second, compute share, efficiency.

Iterations in, numbers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from slipstream.analysis.breakdown import TypicalIteration
from slipstream.errors import TraceError
from slipstream.trace.timeline import Iteration


def samples_per_second(iterations: Sequence[Iteration]) -> float | None:
    """Sum over ranks of the median over iterations of samples / seconds.

    None if their number is unknown: of a rank that never holds it, or of a step that holds it on
    no rank. Where some ranks do, the others had no batch in that step.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", rank, 2, 0.0, 0.5, {"samples": 8}) for rank in range(2)]
        >>> samples_per_second(timeline(spans))
        32.0
    """
    rates: dict[int, list[float]] = defaultdict(list)
    steps = {iteration.step for iteration in iterations if iteration.samples}
    ranks = {iteration.rank for iteration in iterations if iteration.samples}
    for iteration in iterations:
        known = iteration.step in steps and iteration.rank in ranks
        if not known or not iteration.duration:
            return None
        rates[iteration.rank].append(iteration.samples / iteration.duration)
    return sum(map(median, rates.values()))


def iterations_per_second(iterations: Sequence[Iteration]) -> float:
    """Sum over ranks of 1 / the median iteration: batches a second, over all ranks."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for iteration in iterations:
        seconds[iteration.rank].append(iteration.duration)
    return sum(1 / median(of_rank) for of_rank in seconds.values())


def compute_share(typical: TypicalIteration) -> float:
    """``(forward + backward + optimizer) / iteration``, of means over ranks."""
    parts = ("forward", "backward", "optimizer")
    whole = typical.spread("iteration").mean
    return sum(typical.spread(part).mean for part in parts) / whole if whole else 0.0


def scaling_efficiency(many: Sequence[Iteration], one: Sequence[Iteration]) -> float:
    """``(samples/s on N ranks) / (N * samples/s on 1 rank)``: 1 is a linear speed-up.

    Raises:
        TraceError: ``one`` has several ranks, or a trace does not hold its numbers of samples.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> one = [Event("iteration", 0, 2, 0.0, 0.4, {"samples": 8})]
        >>> two = [Event("iteration", rank, 2, 0.0, 0.5, {"samples": 8}) for rank in range(2)]
        >>> scaling_efficiency(timeline(two), timeline(one))
        0.8
    """
    ranks_of_one, ranks = ({iteration.rank for iteration in run} for run in (one, many))
    if len(ranks_of_one) != 1:
        raise TraceError(
            f"the baseline has {len(ranks_of_one)} ranks; allowed: 1. Record the same training on "
            "one rank: slipstream launch --nproc 1."
        )
    rate, base = samples_per_second(many), samples_per_second(one)
    if rate is None or base is None:
        which = "the baseline" if base is None else "the trace"
        raise TraceError(
            f"{which} does not hold the number of samples of each iteration, which the efficiency "
            "needs. Pass the batch as the first tensor of the model's forward, and record again."
        )
    return rate / (len(ranks) * base)
