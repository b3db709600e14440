"""The strategies worth comparing for one workload on one cluster, and their names.

Never measures, and never says which is best: ``plan`` ranks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.exchange import Plan
from slipstream.planner.simulate import predict
from slipstream.planner.split import improve, optimal_cuts
from slipstream.planner.workload import Workload
from slipstream.strategy import (
    ByBytes,
    ByIndex,
    ByLayers,
    ByPercent,
    PerGradient,
    PerLayer,
    Single,
    Split,
    Strategy,
)

MEGABYTES = (1, 2, 4, 8, 16, 25, 32, 64)
LAYERS = (5, 10, 50)
ACCUMULATE = (2, 4)
TOLERANCE = 0.002


def candidates(
    workload: Workload,
    cluster: NetworkProfile,
    exact_only: bool = True,
    base: Strategy = Strategy(),  # noqa: B008 - frozen
) -> list[Strategy]:
    """``base`` first, then other ways to exchange the same gradients, no two of them alike.

    Fixed splits of all kinds, with and without overlap, and the split that is optimal for this
    workload and cluster. Whatever ``base`` says of other things stays.

    Args:
        workload: gradients, and when they are ready.
        cluster: what an exchange costs.
        exact_only: leave out what changes the mathematics of the training (a larger batch by
            accumulation; codecs, of which the cluster's file knows the cost).
        base: the strategy to start from.
    """
    others = [_exchanging(base, split) for split in _fixed_splits()]
    others += [_exchanging(base, split, overlap=False) for split in (Single(), ByBytes())]
    fixed = _distinct([base, *others], workload.gradients)
    best = _exchanging(base, optimal_split(workload, cluster, fixed))
    found = [*fixed, best]
    if not exact_only:
        found += [_accumulating(s, times) for times in ACCUMULATE for s in (base, best)]
        found += [_coded(base, kind) for kind in cluster.codecs]
    return _distinct(found, workload.gradients)


def optimal_split(
    workload: Workload, cluster: NetworkProfile, seeds: Sequence[Strategy]
) -> ByIndex:
    """The split with the smallest predicted iteration.

    The dynamic program (``split``) solves the problem without contention, once for compute and
    exchanges that nothing disturbs and once for both as slow as they make each other throughout.
    The better of the two, or of ``seeds`` if one is better still, is improved on the simulator;
    segments that gain nearly nothing are then joined again: no ready time is known as well as that.
    """
    gradients = workload.gradients
    base = seeds[0]

    def seconds(cuts: Sequence[int]) -> float:
        strategy = _exchanging(base, _by_index(cuts))
        return predict(workload, Plan.of(strategy, gradients, cluster.codecs), cluster)

    sizes = [g.num_bytes for g in gradients]
    curve = cluster.network("world").all_reduce

    def contended(num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        alone = curve.seconds_of(num_bytes)
        latency = np.minimum(alone, curve.latency)
        bytes_alone = alone - latency
        slowed = latency * cluster.latency_slowdown + bytes_alone * cluster.exchange_slowdown
        return np.asarray(alone + slowed)

    before = workload.data_wait + workload.forward
    ready = (before[:, None] + workload.ready).max(axis=0)  # an all-reduce waits for the last rank
    slow_compute = 1.0 + cluster.compute_slowdown
    starts = [
        optimal_cuts(ready, sizes, curve.seconds_of, borders=workload.borders),
        optimal_cuts(ready * slow_compute, sizes, contended, borders=workload.borders),
    ]
    for seed in seeds:
        segments = plan_segments(gradients, seed.gradients.split)
        starts.append(tuple(segment.stop for segment in segments))
    start = min(starts, key=seconds)
    return _by_index(_joined(improve(start, seconds), seconds))


def _joined(cuts: tuple[int, ...], seconds: Callable[[Sequence[int]], float]) -> tuple[int, ...]:
    """Without the cuts that together gain less than TOLERANCE, the least useful ones first."""

    def without(cut: int) -> tuple[int, ...]:
        return tuple(other for other in cuts if other != cut)

    limit = seconds(cuts) * (1 + TOLERANCE)
    for cut in sorted(cuts[:-1], key=lambda cut: seconds(without(cut))):
        if seconds(without(cut)) <= limit:
            cuts = without(cut)
    return cuts


def label(strategy: Strategy) -> str:
    """A strategy's way to exchange gradients in few words.

    Example:
        >>> label(Strategy()), label(Strategy.load("sequential")), label(Strategy.load("hccl"))
        ('by_bytes 8 (first 1, last 1)', 'single, no overlap', 'by_percent 96.54/3.46')
    """
    gradients = strategy.gradients
    words = [_split_label(gradients.split)]
    words += [] if gradients.overlap else ["no overlap"]
    words += [gradients.codec.kind] if gradients.codec else []
    words += [f"accumulate {gradients.accumulate}"] if gradients.accumulate > 1 else []
    return ", ".join(words)


def _split_label(split: Split) -> str:
    match split:
        case ByBytes():
            ends = {"first": split.first_megabytes, "last": split.last_megabytes}
            special = ", ".join(f"{name} {size:g}" for name, size in ends.items() if size)
            return f"by_bytes {split.megabytes:g}" + (f" ({special})" if special else "")
        case ByPercent():
            return "by_percent " + "/".join(f"{percent:g}" for percent in split.percents)
        case ByIndex():
            few = "/".join(map(str, split.last[:6]))
            return f"by_index {few}" + (f"/... ({len(split.last)})" if split.last[6:] else "")
        case ByLayers():
            return f"by_layers {split.layers}"
    return split.kind


def _fixed_splits() -> list[Split]:
    ends = ((1, 1), (1, None), (None, None))
    by_bytes = [
        ByBytes(megabytes=size, first_megabytes=first, last_megabytes=last)
        for size in MEGABYTES
        for first, last in ends
    ]
    by_layers = [ByLayers(layers=layers) for layers in LAYERS]
    return [*by_bytes, ByPercent(), *by_layers, PerLayer(), PerGradient(), Single()]


def _exchanging(base: Strategy, split: Split, *, overlap: bool = True) -> Strategy:
    """``base`` with another split."""
    gradients = base.gradients.model_copy(update={"split": split, "overlap": overlap})
    return base.model_copy(update={"gradients": gradients})


def _accumulating(strategy: Strategy, times: int) -> Strategy:
    """``strategy`` with ``times`` as many backward passes to an update."""
    more = strategy.gradients.accumulate * times
    gradients = strategy.gradients.model_copy(update={"accumulate": more})
    return strategy.model_copy(update={"gradients": gradients})


def _coded(strategy: Strategy, kind: str) -> Strategy:
    """``strategy`` with a codec at its default settings."""
    document = strategy.document()
    document.setdefault("gradients", {})["codec"] = kind
    return Strategy.load(document)


def _by_index(cuts: Sequence[int]) -> ByIndex:
    """Cuts are the index after the last gradient of a segment; a strategy names the last one."""
    return ByIndex(last=tuple(int(cut) - 1 for cut in cuts))


def _distinct(strategies: Sequence[Strategy], gradients: Sequence[Gradient]) -> list[Strategy]:
    """Without those that cut these gradients, and do all else, as an earlier one does."""
    seen: dict[object, Strategy] = {}
    for strategy in strategies:
        segments = plan_segments(gradients, strategy.gradients.split)
        rest = strategy.gradients.model_copy(update={"split": Single()})
        seen.setdefault((segments, rest), strategy)
    return list(seen.values())
