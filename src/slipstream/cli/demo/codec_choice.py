"""Which codecs may pay: predicted from a trace of the exact training on this network.

Predicts only codecs that run in every update that is timed. ``onebit`` and ``dgc`` need some
hundred dense updates first (``start_step``, ``warmup_steps``): more than the demo has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.planner.forecast import Forecast
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy import (
    ByBytesConfig,
    HalfConfig,
    Int8Config,
    PlainCodecConfig,
    PowerSgdConfig,
    Strategy,
)
from slipstream.trace import Trace

NONE = "none"
CODECS: Mapping[str, PlainCodecConfig] = {
    "bf16": HalfConfig(),
    "int8": Int8Config(),
    "PowerSGD": PowerSgdConfig(start_step=0),  # by default, after the end of the demo
}
WORTHWHILE = 0.95
"""Of the exact training's time, at most: predictions are off by as much as the rest."""
CLOSE = 1.1
"""Of the shortest prediction, at most: two that are both off by as much cannot be told apart."""


class Candidate(NamedTuple):
    """A codec with its prediction, in seconds an iteration.

    ``sent`` is the share of the gradients' bytes that is sent.
    """

    codec: str
    sent: float
    segments: int
    predicted: float


def predict(trace: Trace, network: NetworkProfile) -> list[tuple[Candidate, Strategy]]:
    """The exact training of ``trace``, then the same with each of CODECS.

    Raises:
        ClusterError: the network was measured on another number of ranks.
        StrategyError: the network does not hold the cost of CODECS.
        TraceError: the trace lacks what a prediction needs.
    """
    forecast = Forecast.of(trace, network)
    strategies = {NONE: forecast.base}
    for name, codec in CODECS.items():
        coded = forecast.base.with_gradients(codec=codec)
        split = forecast.optimal_split(coded, coded.with_gradients(split=ByBytesConfig()))
        strategies[name] = coded.with_gradients(split=split)
    candidates = []
    for name, strategy in strategies.items():
        [prediction] = forecast.rank([strategy])
        sent = 1.0 if name == NONE else network.codecs[CODECS[name].kind].ratio
        candidate = Candidate(name, sent, prediction.segments, prediction.seconds)
        candidates.append((candidate, strategy))
    return candidates


def worth_trying(
    candidates: Sequence[tuple[Candidate, Strategy]],
) -> list[tuple[Candidate, Strategy]]:
    """The codecs that should pay, without those that are clearly slower than the fastest.

    Example:
        >>> def with_seconds(*times):
        ...     return [(Candidate(name, 1, 1, s), Strategy()) for name, s in zip("abcd", times)]
        >>> [one.codec for one, _ in worth_trying(with_seconds(1.0, 0.90, 0.80, 0.85))]
        ['c', 'd']
        >>> worth_trying(with_seconds(1.0, 0.96, 1.1))
        []
    """
    (exact, _), *coded = candidates
    fastest = min(one.predicted for one, _ in coded)
    longest = min(CLOSE * fastest, WORTHWHILE * exact.predicted)
    return [pair for pair in coded if pair[0].predicted <= longest]
