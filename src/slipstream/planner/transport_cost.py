"""What each transport takes of a network: which collectives, and how it contends.

To add one: a row in ``RECIPES``; where its collectives are new ones, also their names in ``cost``
and how to time them in ``calibration.collective_timer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from slipstream.errors import ClusterError
from slipstream.planner.cost import Collective, Curves, Kind, NetworkProfile
from slipstream.planner.curve import Curve
from slipstream.planner.fit import Array
from slipstream.strategy import Auto, Direct, Flat, Transport
from slipstream.trace.event import Trace

TransportKind = Literal["flat", "direct", "hierarchical", "shared_memory", "sharded"]


class Recipe(NamedTuple):
    """How a transport exchanges the gradients of a segment.

    Attributes:
        stages: collectives one after the other, each in groups of a kind.
        direct: whether they contend with compute as direct sends do.
    """

    stages: tuple[tuple[Kind, Collective], ...]
    direct: bool = False


RECIPES: Mapping[TransportKind, Recipe] = {
    "flat": Recipe((("world", "all_reduce"),)),
    "direct": Recipe((("world", "direct_all_reduce"),), direct=True),
    "shared_memory": Recipe((("world", "all_reduce"),)),  # the backend's, which takes longer
    "hierarchical": Recipe(
        (("intra", "reduce_scatter"), ("inter", "all_reduce"), ("intra", "all_gather"))
    ),
    "sharded": Recipe((("world", "reduce_scatter"),), direct=True),
}
GATHERS: Mapping[TransportKind, tuple[Kind, Collective]] = {"sharded": ("world", "all_gather")}
"""What brings parameters together during the next forward, by transport."""

ALTERNATIVES: tuple[Transport, ...] = (Flat(), Direct())
"""What may be exchanged for one another: exact, and without any change of the user's code."""


def curves_of(transports: Iterable[TransportKind]) -> Curves:
    """The curves that predictions for any of these transports read.

    Example:
        >>> curves_of(["flat", "direct"])
        {'world': ('all_reduce', 'direct_all_reduce')}
    """
    merged: dict[Kind, tuple[Collective, ...]] = {"world": ("all_reduce",)}  # of buffers
    for transport in transports:
        recipe = RECIPES[transport]
        read = [*recipe.stages, *([GATHERS[transport]] if transport in GATHERS else [])]
        read += [("world", "direct_all_reduce")] if recipe.direct else []  # for its contention
        for kind, name in read:
            merged[kind] = tuple(dict.fromkeys((*merged.get(kind, ()), name)))
    return merged


def transport_kind(transport: Transport) -> TransportKind:
    """The kind of a transport; ``auto`` counts as the one that it begins with."""
    return "flat" if isinstance(transport, Auto) else transport.kind


def is_priced(transport: Transport, network: NetworkProfile) -> bool:
    """Whether all that a prediction of this transport reads was measured."""
    try:
        ExchangeCurve.of(transport_kind(transport), network)
    except ClusterError:
        return False
    return True


def traced_transport(trace: Trace) -> TransportKind:
    """The kind of transport that a trace was recorded under."""
    gradients: dict[str, Any] = (trace.meta.get("strategy") or {}).get("gradients") or {}
    transport: Any = gradients.get("transport") or "flat"
    kind: Any = transport if isinstance(transport, str) else transport["kind"]
    return "flat" if kind == "auto" else kind


class ExchangeCurve(NamedTuple):
    """What a transport takes for a segment: its stages, each with its share of the bytes."""

    stages: tuple[tuple[Kind, Curve, float], ...]

    @classmethod
    def of(cls, transport: TransportKind, network: NetworkProfile) -> ExchangeCurve:
        """The stages on this network: ``flat``'s for one host, or hosts of one rank.

        Raises:
            ClusterError: a curve was not measured.
        """
        stages = RECIPES[transport].stages
        if network.hosts == 1 or network.ranks_per_host == 1:
            stages = stages if stages[0][0] == "world" else RECIPES["flat"].stages
        shares = {"inter": 1 / network.ranks_per_host}  # a reduce-scatter inside came before
        return cls(
            tuple((k, network.groups(k).curve(name), shares.get(k, 1.0)) for k, name in stages)
        )

    @property
    def latency(self) -> float:
        """Seconds that do not depend on the bytes."""
        return sum(curve.latency for _, curve, _ in self.stages)

    def seconds_of(self, num_bytes: Array) -> Array:
        """Seconds for each size."""
        parts = [curve.seconds_of(num_bytes * share) for _, curve, share in self.stages]
        return np.asarray(np.sum(parts, axis=0))
