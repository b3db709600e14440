"""Predict the choices of a search, and say which of them are worth a measurement. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from slipstream.gradients.layout import plan_segments
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.transport_cost import is_priced
from slipstream.planner.search.candidates import REPLICATED
from slipstream.strategy import (
    ByBytesConfig,
    ShardedConfig,
    SingleConfig,
    SplitConfig,
    TransportConfig,
)
from slipstream.tuner.search_space import Choice
from slipstream.tuner.turns import MOST

NEARBY = (ByBytesConfig(megabytes=2), ByBytesConfig(megabytes=8), ByBytesConfig(megabytes=16))
"""Predicted besides the computed split: the cost of one more segment is the least certain part."""

THIRD, PLAIN = 0.33, ByBytesConfig(megabytes=16)
"""A replicated part and a split with nothing computed: on slow links often the best of ``sharded``,
by up to a tenth, where a prediction puts computed segments a little ahead of them."""


def predict_choices(
    forecast: Forecast, transports: Sequence[TransportConfig], overlap: Sequence[bool]
) -> list[tuple[Choice, float]]:
    """Choices with their predicted seconds, no two alike, that of ``forecast.base`` first.

    A transport whose cost was not measured is there once, with infinite seconds.

    Args:
        forecast: of a trace under the first choice.
        transports: to choose among, that of ``base`` first.
        overlap: to choose among, likewise.

    Raises:
        StrategyError: the codec was not measured.
    """
    base = forecast.base
    predicted: dict[object, tuple[Choice, float]] = {}
    for transport in transports:
        if not is_priced(transport, forecast.network):
            unknown = Choice(transport, base.gradients.split, overlap[0])
            predicted[transport] = unknown, inf
            continue
        if isinstance(transport, ShardedConfig):
            predicted |= {one: (one, seconds) for one, seconds in _sharded_ways(forecast)}
            continue
        best = forecast.optimal_split(base.with_gradients(transport=transport))
        for split, beside in _ways((base.gradients.split, best), overlap):
            choice = Choice(transport, split, beside)
            strategy = base.with_gradients(**choice._asdict())
            key = transport, plan_segments(forecast.workload.gradients, split), beside
            if key not in predicted:
                predicted[key] = choice, forecast.seconds(strategy)
    return list(predicted.values())


def _sharded_ways(forecast: Forecast) -> Iterator[tuple[Choice, float]]:
    """``sharded`` by default, with the best splits and the best replicated part, and plain."""
    own, best = forecast.best_sharded(REPLICATED[:1])
    *_, replicated = forecast.best_sharded(REPLICATED[1:])
    for strategy in (own, best, replicated):
        config = strategy.gradients
        yield Choice(config.transport, config.split), forecast.seconds(strategy)
    third = own.gradients.transport.model_copy(update={"replicated": THIRD})
    plain = forecast.base.with_gradients(transport=third, split=PLAIN)
    yield Choice(third, PLAIN), forecast.seconds(plain)


def _ways(
    splits: tuple[SplitConfig, SplitConfig], overlap: Sequence[bool]
) -> Iterator[tuple[SplitConfig, bool]]:
    """The first split, the computed one and others; then without overlap, if that is open."""
    yield from ((split, overlap[0]) for split in (*splits, *NEARBY))
    yield from ((split, after) for after in overlap[1:] for split in (SingleConfig(), splits[0]))


def promising(predicted: Sequence[tuple[Choice, float]]) -> tuple[Choice, ...]:
    """The choices to measure of those predicted: the first of all, then by rising seconds.

    Among them are the best of all, and the best one of every transport beside backward (of
    ``sharded`` with and without a replicated part, and plain), as many as fit into `MOST`, by
    prediction: what one transport costs against another is less certain than what a split costs
    against another.

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


def _way(choice: Choice) -> tuple[str, bool, bool]:
    transport = choice.transport
    part = transport.replicated if isinstance(transport, ShardedConfig) else 0.0
    return transport.kind, part > 0, part == THIRD and choice.split == PLAIN
