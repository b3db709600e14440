"""Time of an update where ranks train on their own and meet rarely.

With u the time of an update alone on the slowest rank, and e that of the exchange of a fragment,
codec included, a round of ``steps`` updates with F fragments takes

    steps u + F (max(0, e - delay u) + s min(e, delay u))

where s is how much an exchange slows computing down beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slipstream.errors import StrategyError
from slipstream.planner.iteration.transport_cost import ExchangeCurve, transport_kind
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy import Int4Config, LocalConfig, PlainCodecConfig, Strategy

WEIGHTS = 16.0
"""Bytes of what ranks tell each other before they exchange a fragment."""


def local_seconds(strategy: Strategy, workload: Workload, network: NetworkProfile) -> float:
    """Predict an update in the long run, after the warm-up.

    Raises:
        StrategyError: the cost of its codec was not measured.
        ClusterError: the transport needs a network that was not measured.
    """
    config = strategy.local
    assert config is not None
    update = float(workload.alone(strategy.gradients.accumulate).max())
    exchange = _fragment_seconds(strategy, config, workload, network)
    hidden = min(exchange, config.delay * update)
    contention = network.contention(transport_kind(strategy.gradients.transport) == "direct")
    stolen = hidden * contention.compute_slowdown
    each = exchange - hidden + stolen
    return update + config.fragments * each / config.steps


def _fragment_seconds(
    strategy: Strategy, config: LocalConfig, workload: Workload, network: NetworkProfile
) -> float:
    cost = _cost(config, network)
    num_bytes = change_bytes(workload) / config.fragments
    curve = ExchangeCurve.of(transport_kind(strategy.gradients.transport), network)
    # the weights of the ranks travel first, by themselves
    wire = float(curve.seconds_of(np.array([WEIGHTS, num_bytes * cost.ratio])).sum())
    return wire + num_bytes * (cost.encode + cost.decode) + 2 * cost.startup


def local_bytes(strategy: Strategy, workload: Workload, network: NetworkProfile) -> float:
    """Bytes of changes that stand for a rank's gradients, an update."""
    assert strategy.local is not None
    num_bytes = change_bytes(workload)
    return num_bytes * _cost(strategy.local, network).ratio / strategy.local.steps


def change_bytes(workload: Workload) -> int:
    """Bytes of a change of the whole model, those of its gradients where nothing else is known.

    A change is dense where a gradient is sparse, and in fp32 where a gradient has 16 bits.
    """
    return workload.change_bytes or sum(gradient.num_bytes for gradient in workload.gradients)


def _cost(config: LocalConfig, network: NetworkProfile) -> CodecCost:
    return CodecCost(ratio=1.0) if config.codec is None else codec_cost(config, network.codecs)


def is_costed(codec: PlainCodecConfig, codecs: Mapping[str, CodecCost]) -> bool:
    """Whether the cost of a codec of changes is known."""
    return codec.kind in codecs or (isinstance(codec, Int4Config) and "int8" in codecs)


def codec_cost(config: LocalConfig, codecs: Mapping[str, CodecCost]) -> CodecCost:
    """The cost of a codec; that of ``int4`` is taken to be that of ``int8``, at half the bytes.

    Raises:
        StrategyError: it was not measured.
    """
    assert config.codec is not None
    kind = config.codec.kind
    if kind not in codecs and isinstance(config.codec, Int4Config) and "int8" in codecs:
        scales = 4 / config.codec.block
        return codecs["int8"].model_copy(update={"ratio": (0.5 + scales) / 4})
    if kind not in codecs:
        raise StrategyError(
            f"local.codec {kind}: its cost was not measured; measured: "
            f"{', '.join(codecs) or 'none'}; slipstream doctor network measures codecs"
        )
    return codecs[kind]
