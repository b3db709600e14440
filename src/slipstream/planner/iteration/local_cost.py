"""Time of an update where ranks train on their own and meet rarely.

With u the time of an update alone on the slowest rank, e that of the exchange of a fragment, codec
included, and m that of sending a change and merging the mean, a round of ``steps`` updates with F
fragments takes

    steps u + F (x + s (e - x) + m),   x = E max(0, e' - delay u)

where x is the part of an exchange that computing does not hide, e' varies around e from one
exchange to the next by `VARIES`, and s is how much an exchange slows computing down beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from slipstream.errors import StrategyError
from slipstream.planner.iteration.transport_cost import (
    ExchangeCurve,
    TransportKind,
    curves_of,
    transport_kind,
)
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.profile import CollectiveName, Curves, NetworkProfile
from slipstream.strategy import (
    Int4Config,
    Int8Config,
    LocalConfig,
    OneBitConfig,
    PlainCodecConfig,
    Strategy,
)

VARIES = 0.2
"""Standard deviation of an exchange, as a part of it. On emulated hosts at 100 Mbit/s it is 0.13 to
0.17, with a tail. A delay that hides the usual exchange alone leaves the longer ones to be waited
for."""
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
    exposed = _excess(exchange, config.delay * update)
    contention = network.contention(transport_kind(strategy.gradients.transport) == "direct")
    stolen = (exchange - exposed) * contention.compute_slowdown
    merging = network.merging * change_bytes(workload) / config.fragments
    each = exposed + stolen + merging
    return update + config.fragments * each / config.steps


def _excess(exchange: float, hidden: float) -> float:
    """The mean of what exchanges of normally distributed length take beyond ``hidden`` seconds.

    Example:
        >>> _excess(1.0, 0.0), round(_excess(1.0, 1.0), 3), round(_excess(1.0, 1.4), 3)
        (1.0, 0.08, 0.002)
    """
    spread = VARIES * exchange
    if not (hidden and spread):
        return exchange
    beyond = NormalDist().cdf((exchange - hidden) / spread) * (exchange - hidden)
    return beyond + spread**2 * NormalDist(hidden, spread).pdf(exchange)


def _fragment_seconds(
    strategy: Strategy, config: LocalConfig, workload: Workload, network: NetworkProfile
) -> float:
    cost = _cost(config, network)
    num_bytes = change_bytes(workload) / config.fragments
    curve = ExchangeCurve.of(transport_kind(strategy.gradients.transport), network)
    # the weights of the ranks travel first, by themselves
    weights, wire = curve.seconds_of(np.array([WEIGHTS, num_bytes * cost.ratio]))
    world = network.networks["world"]
    in_parts = isinstance(config.codec, Int4Config | Int8Config | OneBitConfig)
    is_flat = transport_kind(strategy.gradients.transport) == "flat"
    if in_parts and is_flat and world.reduce_scatter is not None:
        # sums cannot travel coded: every rank sends each other one its part, as a reduce-scatter by
        # direct sends does, and only then the sums go around, as in half an all-reduce
        wire = world.reduce_scatter.seconds(num_bytes * cost.ratio) + wire / 2
    coding = num_bytes * (cost.encode + cost.decode) + 2 * cost.startup
    return float(weights + wire) + coding


def meeting_curves(transport: TransportKind) -> Curves:
    """The curves that predictions of meetings and of gradients over a transport read.

    Example:
        >>> meeting_curves("flat")
        {'world': ('all_reduce', 'reduce_scatter')}
    """
    curves = curves_of([transport])
    if transport in ("direct", "shared_memory"):
        return curves
    parts: CollectiveName = "reduce_scatter"  # by flat where it cannot carry meetings itself
    return {**curves, "world": tuple(dict.fromkeys((*curves["world"], parts)))}


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
