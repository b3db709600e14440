"""Which codecs may pay: predicted from a trace of the exact training on this network.

Predicts only codecs that run in every update that is timed. ``onebit`` and ``dgc`` need some
hundred dense updates first (``start_step``, ``warmup_steps``): more than the demo has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.planner.candidates import optimal_split, with_gradients
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.ranking import rank, traced_strategy
from slipstream.planner.workload import Workload
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
    "PowerSGD": PowerSgdConfig(
        start_step=0
    ),  # 1000 by default: the demo would end before it starts
}
WORTHWHILE = 0.95
"""Of the exact training's time, at most: predictions are off by as much as the rest."""
CLOSE = 1.1
"""Of the shortest prediction, at most: two that are both off by as much cannot be told apart."""


class Candidate(NamedTuple):
    """What the planner predicts of a codec, in seconds an iteration.

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
    exact = traced_strategy(trace)
    workload, fitted = prepare(trace, network)
    strategies = {NONE: exact}
    for name, codec in CODECS.items():
        strategies[name] = _with_codec(codec, exact, workload, fitted)
    candidates = []
    for name, strategy in strategies.items():
        [prediction] = rank([strategy], workload, fitted)
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


def _with_codec(
    codec: PlainCodecConfig, exact: Strategy, workload: Workload, network: NetworkProfile
) -> Strategy:
    """The codec with the split that is optimal for it, by the transport of the exact training."""
    coded = with_gradients(exact, codec=codec)
    seeds = [coded, with_gradients(coded, split=ByBytesConfig())]
    return with_gradients(coded, split=optimal_split(workload, network, seeds))
