"""Predict the choices of a search, and say which of them are worth a measurement. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from slipstream.gradients.layout import Gradient
from slipstream.planner.candidates import REPLICATED, optimal_split, sharded, with_gradients
from slipstream.planner.comm_plan import CommPlan
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.simulate import predict
from slipstream.planner.transport_cost import is_priced
from slipstream.planner.workload import Workload
from slipstream.strategy import (
    ByBytesConfig,
    ShardedConfig,
    SingleConfig,
    SplitConfig,
    Strategy,
    TransportConfig,
)
from slipstream.tuner.search_space import MOST, Choice

NEARBY = (ByBytesConfig(megabytes=2), ByBytesConfig(megabytes=8), ByBytesConfig(megabytes=16))
"""Predicted besides the computed split: the cost of one more segment is the least certain part."""


def predict_choices(
    base: Strategy,
    transports: Sequence[TransportConfig],
    overlap: Sequence[bool],
    gradients: Sequence[Gradient],
    workload: Workload,
    network: NetworkProfile,
) -> list[tuple[Choice, float]]:
    """Choices with their predicted seconds, no two alike, that of ``base`` first.

    A transport whose cost was not measured is there once, with infinite seconds.

    Args:
        base: the strategy with the first choice.
        transports: to choose among, that of ``base`` first.
        overlap: to choose among, likewise.
        gradients: in ready order.
        workload: as a trace under ``base`` shows it.
        network: what exchanges cost.

    Raises:
        StrategyError: the codec was not measured.
    """
    predicted: dict[object, tuple[Choice, float]] = {}
    for transport in transports:
        if not is_priced(transport, network):
            unknown = Choice(transport, base.gradients.split, overlap[0])
            predicted[transport] = unknown, inf
            continue
        if isinstance(transport, ShardedConfig):
            ways = _sharded_ways(base, workload, network)
            predicted |= {one: (one, seconds) for one, seconds in ways}
            continue
        best = optimal_split(workload, network, [with_gradients(base, transport=transport)])
        for split, beside in _ways((base.gradients.split, best), overlap):
            choice = Choice(transport, split, beside)
            plan = CommPlan.of(with_gradients(base, **choice._asdict()), gradients, network.codecs)
            key = transport, plan.cuts, beside
            if key not in predicted:
                predicted[key] = choice, predict(workload, plan, network)
    return list(predicted.values())


def _sharded_ways(
    base: Strategy, workload: Workload, network: NetworkProfile
) -> Iterator[tuple[Choice, float]]:
    """``sharded`` by default, and with the splits and the replicated part that are best."""
    own, best = sharded(workload, network, base, [base], REPLICATED[:1])
    *_, replicated = sharded(workload, network, base, [base], REPLICATED[1:])
    for strategy in (own, best, replicated):
        config = strategy.gradients
        plan = CommPlan.of(strategy, workload.gradients, network.codecs)
        yield Choice(config.transport, config.split), predict(workload, plan, network)


def _ways(
    splits: tuple[SplitConfig, SplitConfig], overlap: Sequence[bool]
) -> Iterator[tuple[SplitConfig, bool]]:
    """The first split, the computed one and others; then without overlap, if that is open."""
    yield from ((split, overlap[0]) for split in (*splits, *NEARBY))
    yield from ((split, after) for after in overlap[1:] for split in (SingleConfig(), splits[0]))


def promising(predicted: Sequence[tuple[Choice, float]]) -> tuple[Choice, ...]:
    """The choices to measure of those predicted: the first of all, then by rising seconds.

    Among them are the best of all, and the best one of every transport beside backward (of
    ``sharded`` with and without a replicated part): what one transport costs against another is
    less certain than what a split costs against another.

    Example:
        >>> from slipstream.strategy import DirectConfig, FlatConfig, SingleConfig
        >>> one, other = (Choice(t, SingleConfig()) for t in (FlatConfig(), DirectConfig()))
        >>> [choice.transport.kind for choice in promising([(one, 1.0), (other, 2.0)])]
        ['flat', 'direct']
    """
    default = predicted[0][0]
    ranked = [default, *(c for c, _ in sorted(predicted, key=lambda p: p[1]) if c != default)]
    beside = [choice for choice in ranked[1:] if choice.overlap == default.overlap]
    best = {_way(choice): choice for choice in reversed(beside)}
    first = [default, *ranked[1:2], *best.values()]
    chosen = [c for c in ranked if c in first][:MOST]
    chosen += [c for c in ranked if c not in chosen][: MOST - len(chosen)]
    return tuple(c for c in ranked if c in chosen)


def _way(choice: Choice) -> tuple[str, bool]:
    transport = choice.transport
    return transport.kind, isinstance(transport, ShardedConfig) and transport.replicated > 0
