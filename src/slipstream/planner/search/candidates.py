"""The strategies worth comparing for one workload on one network.

``ranking`` says which of them is best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.iteration.model import seconds_of
from slipstream.planner.iteration.transport_cost import (
    ALTERNATIVES,
    GATHERS,
    RECIPES,
    ExchangeCurve,
    is_priced,
    num_replicated,
    transport_kind,
)
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.fit import Array
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.gather_split import optimal_gather_cuts
from slipstream.planner.search.split import improve, optimal_cuts
from slipstream.strategy import (
    ByBytesConfig,
    ByIndexConfig,
    ByLayersConfig,
    ByPercentConfig,
    HalfWeightsConfig,
    PerGradientConfig,
    PerLayerConfig,
    ShardedConfig,
    SingleConfig,
    SplitConfig,
    Strategy,
    keeps_state,
    takes_momentum,
)
from slipstream.trace.event import OWING_CODEC

MEGABYTES = (1, 2, 4, 8, 16, 25, 32, 64)
LAYERS = (5, 10, 50)
REPLICATED = (0.0, 0.25, 0.33, 0.5)
"""Parts of the bytes that every rank updates under ``sharded``."""
ACCUMULATE = (2, 4)
TOLERANCE = 0.002
"""Predictions that differ by less are equal; no ready time is known any better."""


def exact(workload: Workload, network: NetworkProfile, base: Strategy) -> list[Strategy]:
    """``base`` first, then other ways to exchange the same gradients, all of them different.

    Fixed splits of all kinds with overlap, some without, and the split that is optimal for this
    workload and network; by each other transport whose cost is known, the split of ``base`` and the
    optimal one; likewise by ``sharded`` where the optimizer allows it. Other settings of ``base``
    stay.

    Args:
        workload: gradients, and when they are ready.
        network: what an exchange costs.
        base: the strategy to start from.
    """
    return _exact(workload, network, base, *_by_split(workload, network, base))


def _exact(
    workload: Workload,
    network: NetworkProfile,
    base: Strategy,
    fixed: Sequence[Strategy],
    best: Strategy,
) -> list[Strategy]:
    kind = transport_kind(base.gradients.transport)
    strategies = [*fixed, best]
    for transport in ALTERNATIVES:
        if transport_kind(transport) != kind and is_priced(transport, network):
            seeds = [one.with_gradients(transport=transport) for one in (base, *fixed, best)]
            split = optimal_split(workload, network, seeds)
            strategies += [seeds[0], seeds[0].with_gradients(split=split, overlap=True)]
    allowed = workload.shardable or isinstance(base.gradients.transport, ShardedConfig)
    momentum = takes_momentum(base.gradients.codec)
    if allowed and not momentum and is_priced(ShardedConfig(), network):
        strategies += sharded(workload, network, base, [base, best])
    return _distinct(strategies, workload.gradients)


def lossy(workload: Workload, network: NetworkProfile, bases: Sequence[Strategy]) -> list[Strategy]:
    """List strategies that change the mathematics: accumulation, 16-bit weights, and codecs.

    Weights of 16 bits are taken to compute as fast as those of the trace, unless the network file
    says how fast they are here. Codecs are those whose cost it holds, on the first of ``bases``.
    What the framework of the workload refuses is left out.

    Args:
        workload: gradients, and when they are ready.
        network: what an exchange costs.
        bases: exact strategies to start from, that of the user first.
    """
    strategies = [
        one.with_gradients(accumulate=one.gradients.accumulate * times)
        for times in (() if "gradients.accumulate" in workload.not_proposed else ACCUMULATE)
        for one in bases
    ]
    # What is left to send in one segment may take less time than another one takes to begin.
    for one in (bases[0], bases[0].with_gradients(split=SingleConfig())):
        strategies += coded(one, workload, network)
    if bases[0].precision is None and "precision" not in workload.not_proposed:
        half = HalfWeightsConfig()
        strategies += [one.model_copy(update={"precision": half}) for one in bases]
    return _distinct(strategies, workload.gradients)


def every(workload: Workload, network: NetworkProfile, base: Strategy) -> list[Strategy]:
    """`exact`, then `lossy` on ``base`` and on its optimal split."""
    fixed, best = _by_split(workload, network, base)
    strategies = _exact(workload, network, base, fixed, best)
    strategies += lossy(workload, network, [base, best])
    return _distinct(strategies, workload.gradients)


def coded(base: Strategy, workload: Workload, network: NetworkProfile) -> list[Strategy]:
    """``base`` with each codec whose cost is known, and that the optimizer and the framework of the
    workload allow."""
    sharded = isinstance(base.gradients.transport, ShardedConfig)
    kinds = [kind for kind in network.codecs if kind != "dgc" or (workload.sgd and not sharded)]
    found = [base.with_gradients(codec=kind) for kind in kinds]
    if OWING_CODEC not in workload.not_proposed:
        return found
    return [one for one in found if (codec := one.gradients.codec) and not keeps_state(codec)]


def _by_split(
    workload: Workload, network: NetworkProfile, base: Strategy
) -> tuple[list[Strategy], Strategy]:
    """``base`` with fixed splits, and with the one that is optimal for its transport."""
    others = [base.with_gradients(split=split, overlap=True) for split in _fixed_splits()]
    after = (SingleConfig(), ByBytesConfig())
    others += [base.with_gradients(split=split, overlap=False) for split in after]
    fixed = _distinct([base, *others], workload.gradients)
    split = optimal_split(workload, network, fixed)
    return fixed, base.with_gradients(split=split, overlap=True)


def optimal_split(
    workload: Workload, network: NetworkProfile, seeds: Sequence[Strategy]
) -> ByIndexConfig:
    """The split with the smallest predicted iteration.

    The dynamic program (``split``) solves the problem without contention. It runs twice: with
    compute and exchanges at full speed, and with both as slow as they make each other while they
    overlap. The best of the two and of ``seeds`` is improved by local search on the simulator;
    then segments that gain less than TOLERANCE are joined again.

    Args:
        workload: gradients, and when they are ready.
        network: what an exchange costs.
        seeds: strategies to start from; all but the split is taken from the first one.
    """
    gradients = workload.gradients

    def seconds(cuts: Sequence[int]) -> float:
        strategy = seeds[0].with_gradients(split=ByIndexConfig.of_cuts(cuts), overlap=True)
        return seconds_of(strategy, workload, network)

    sizes = [g.num_bytes for g in gradients]
    kind = transport_kind(seeds[0].gradients.transport)
    curve, beside = ExchangeCurve.of(kind, network), network.contention(RECIPES[kind].direct)

    def contended(num_bytes: Array) -> Array:
        alone = curve.seconds_of(num_bytes)
        latency = np.minimum(alone, curve.latency)
        slowed = latency * beside.latency_slowdown + (alone - latency) * beside.exchange_slowdown
        return np.asarray(alone + slowed)

    before = workload.data_wait + workload.forward
    ready = (before[:, None] + workload.ready).max(axis=0)  # an all-reduce waits for the last rank
    slow_compute = 1.0 + beside.compute_slowdown
    starts = [
        optimal_cuts(ready, sizes, curve.seconds_of, borders=workload.borders),
        optimal_cuts(ready * slow_compute, sizes, contended, borders=workload.borders),
    ]
    for seed in seeds:
        starts.append(tuple(s.stop for s in plan_segments(gradients, seed.gradients.split)))
    return ByIndexConfig.of_cuts(_joined(improve(min(starts, key=seconds), seconds), seconds))


def sharded(
    workload: Workload,
    network: NetworkProfile,
    base: Strategy,
    seeds: Sequence[Strategy],
    parts: Sequence[float] = REPLICATED,
) -> list[Strategy]:
    """``base`` by ``sharded`` as it is by default, and as it is predicted to be fastest.

    First the part that every rank updates is chosen, each with all-gathers as by default and with
    the optimal ones, under the splits of ``seeds``; then the split for it.
    """
    own = base.gradients.transport
    own = own if isinstance(own, ShardedConfig) else ShardedConfig()
    options = []
    for part in parts:
        config = own.model_copy(update={"replicated": part})
        gather = optimal_gather(workload, network, num_replicated(workload.gradients, config))
        options += [
            base.with_gradients(
                transport=config.model_copy(update={"gather": cuts}),
                split=seed.gradients.split,
                overlap=True,
            )
            for seed, cuts in product(
                seeds, [ShardedConfig().gather, *([gather] if gather else [])]
            )
        ]

    best = min(options, key=lambda one: seconds_of(one, workload, network))
    split = optimal_split(workload, network, [best])
    return [base.with_gradients(transport=own), best.with_gradients(split=split)]


def optimal_gather(
    workload: Workload, network: NetworkProfile, replicated: int = 0
) -> ByIndexConfig | None:
    """The all-gathers under which the next forward ends first, of parameters in forward order.

    The exact program of the second phase of ``sharded`` (``gather_split``), with the forward of the
    rank that is slowest in total. All-gathers are taken to cost a latency and a time for each byte.

    Args:
        workload: gradients, and how long forward takes.
        network: what an all-gather costs.
        replicated: how many parameters, the last ones in forward order, are not gathered. None is
            returned where that is all of them.

    Raises:
        ClusterError: all-gathers were not measured.
    """
    kind, name = GATHERS["sharded"]
    curve = network.groups(kind).curve(name)
    count = len(workload.gradients) - replicated
    times = workload.forward_times[int(workload.forward.argmax())][:count]
    sizes = [gradient.num_bytes for gradient in workload.gradients[::-1]][:count]
    cuts = optimal_gather_cuts(times, sizes, curve.latency, curve.per_byte, tolerance=TOLERANCE)
    return ByIndexConfig.of_cuts(cuts) if cuts else None


def _joined(cuts: tuple[int, ...], seconds: Callable[[Sequence[int]], float]) -> tuple[int, ...]:
    """Drop cuts, the least useful ones first, that together gain less than TOLERANCE."""

    def without(cut: int) -> tuple[int, ...]:
        return tuple(other for other in cuts if other != cut)

    limit = seconds(cuts) * (1 + TOLERANCE)
    for cut in sorted(cuts[:-1], key=lambda cut: seconds(without(cut))):
        if seconds(without(cut)) <= limit:
            cuts = without(cut)
    return cuts


def _fixed_splits() -> list[SplitConfig]:
    by_bytes = [
        ByBytesConfig(megabytes=size, first_megabytes=first, last_megabytes=last)
        for size, (first, last) in product(MEGABYTES, ((1, 1), (1, None), (None, None)))
    ]
    by_layers = [ByLayersConfig(layers=layers) for layers in LAYERS]
    return [
        *by_bytes,
        ByPercentConfig(),
        *by_layers,
        PerLayerConfig(),
        PerGradientConfig(),
        SingleConfig(),
    ]


def _distinct(strategies: Sequence[Strategy], gradients: Sequence[Gradient]) -> list[Strategy]:
    """Drop strategies that exchange these gradients exactly as an earlier one does."""
    first: dict[object, Strategy] = {}
    for strategy in strategies:
        segments = plan_segments(gradients, strategy.gradients.split)
        rest = strategy.gradients.model_copy(update={"split": SingleConfig()})
        first.setdefault((segments, rest, strategy.precision), strategy)
    return list(first.values())
