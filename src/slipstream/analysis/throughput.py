"""How fast the ranks of a trace train, alone and against one rank: samples a second, efficiency.

Never reads a file and never draws a table: iterations in, numbers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from slipstream.analysis.breakdown import Typical
from slipstream.errors import TraceError
from slipstream.trace.timeline import Iteration


def samples_per_second(iterations: Sequence[Iteration]) -> float | None:
    """Sum over ranks of the median over iterations of samples / seconds.

    None where an iteration does not tell its samples.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", rank, 2, 0.0, 0.5, {"samples": 8}) for rank in range(2)]
        >>> samples_per_second(timeline(spans))
        32.0
    """
    rates: dict[int, list[float]] = defaultdict(list)
    for iteration in iterations:
        if not iteration.samples or not iteration.duration:
            return None
        rates[iteration.rank].append(iteration.samples / iteration.duration)
    return sum(map(median, rates.values()))


def iterations_per_second(iterations: Sequence[Iteration]) -> float:
    """Sum over ranks of 1 / the median iteration: the batches that all ranks train on a second."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for iteration in iterations:
        seconds[iteration.rank].append(iteration.duration)
    return sum(1 / median(own) for own in seconds.values())


def compute_share(middle: Typical) -> float:
    """``(forward + backward + optimizer) / iteration``, of medians over ranks."""
    parts = ("forward", "backward", "optimizer")
    whole = middle.spread("iteration").median
    return sum(middle.spread(part).median for part in parts) / whole if whole else 0.0


def scaling_efficiency(many: Sequence[Iteration], one: Sequence[Iteration]) -> float:
    """``(samples/s on N ranks) / (N * samples/s on 1 rank)``: 1 is a linear speed-up.

    Raises:
        TraceError: ``one`` has several ranks, or a trace does not tell its samples.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> one = [Event("iteration", 0, 2, 0.0, 0.4, {"samples": 8})]
        >>> two = [Event("iteration", rank, 2, 0.0, 0.5, {"samples": 8}) for rank in range(2)]
        >>> scaling_efficiency(timeline(two), timeline(one))
        0.8
    """
    alone, ranks = ({iteration.rank for iteration in own} for own in (one, many))
    if len(alone) != 1:
        raise TraceError(
            f"the baseline has {len(alone)} ranks; allowed: 1. Record the same training on one "
            "rank: slipstream launch --nproc 1."
        )
    rate, base = samples_per_second(many), samples_per_second(one)
    if rate is None or base is None:
        which = "the baseline" if base is None else "the trace"
        raise TraceError(
            f"{which} does not tell how many samples an iteration had, so there is no efficiency. "
            "Give the model's forward a batch as its first tensor, and record again."
        )
    return rate / (len(ranks) * base)
