"""Costs of transports: which collectives each takes of a network, and how it contends.

To add one: a row in ``RECIPES``; where its collectives are new ones, also their names in
``network.profile.CollectiveName`` and how to time them in ``calibration.collective_timer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from slipstream.errors import ClusterError
from slipstream.gradients.layout import Gradient, nearest_border
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.fit import Array
from slipstream.planner.network.profile import CollectiveName, Curves, GroupKind, NetworkProfile
from slipstream.strategy import (
    AutoConfig,
    DirectConfig,
    FlatConfig,
    HierarchicalConfig,
    ShardedConfig,
    TransportConfig,
)

TransportKind = Literal["flat", "direct", "hierarchical", "shared_memory", "sharded"]


class Recipe(NamedTuple):
    """The collectives by which a transport exchanges the gradients of a segment.

    Attributes:
        stages: collectives one after the other, each in groups of a kind.
        in_order: whether many are in flight, and the network serves first what was sent first.
        direct: whether they and compute slow each other down as direct sends do, and not as the
            backend's collectives do.
        rounds: how often each stage waits and then sends, an equal part of its cost each time.
    """

    stages: tuple[tuple[GroupKind, CollectiveName], ...]
    in_order: bool = False
    direct: bool = False
    rounds: int = 1


RECIPES: Mapping[TransportKind, Recipe] = {
    "flat": Recipe((("world", "all_reduce"),)),
    "direct": Recipe((("world", "direct_all_reduce"),), in_order=True, direct=True, rounds=2),
    "shared_memory": Recipe((("world", "shared_memory_all_reduce"),)),
    "hierarchical": Recipe(
        (("intra", "reduce_scatter"), ("inter", "direct_all_reduce"), ("intra", "all_gather")),
        in_order=True,
        direct=True,
    ),
    "sharded": Recipe((("world", "reduce_scatter"),), in_order=True, direct=True),
}
GATHERS: Mapping[TransportKind, tuple[GroupKind, CollectiveName]] = {
    "sharded": ("world", "all_gather")
}
"""What brings parameters together during the next forward, by transport."""


def sends_early(transport: TransportKind) -> bool:
    """Whether what a rank hands over slows the others' computing down before they have it, too.

    ``sharded`` counts as if it did not: ranks wait for parameters during forward, so that they
    reach backward more closely together than in the traces of other transports.
    """
    return RECIPES[transport].direct and transport not in GATHERS


ALTERNATIVES: tuple[TransportConfig, ...] = (FlatConfig(), DirectConfig(), HierarchicalConfig())
"""What may be exchanged for one another: exact, and without any change of the user's code."""


def curves_of(transports: Iterable[TransportKind]) -> Curves:
    """The curves that predictions for any of these transports read.

    Example:
        >>> curves_of(["flat", "direct"])
        {'world': ('all_reduce', 'direct_all_reduce')}
    """
    merged: dict[GroupKind, tuple[CollectiveName, ...]] = {"world": ("all_reduce",)}  # of buffers
    for transport in transports:
        recipe = RECIPES[transport]
        read = [*recipe.stages, *([GATHERS[transport]] if transport in GATHERS else [])]
        read += [("world", "direct_all_reduce")] if recipe.direct else []  # for its contention
        for kind, name in read:
            merged[kind] = tuple(dict.fromkeys((*merged.get(kind, ()), name)))
    return merged


def transport_kind(transport: TransportConfig) -> TransportKind:
    """The kind of a transport; ``auto`` counts as the one that it begins with."""
    return "flat" if isinstance(transport, AutoConfig) else transport.kind


def is_priced(transport: TransportConfig, network: NetworkProfile) -> bool:
    """Whether all that a prediction of this transport reads was measured; of ``hierarchical`` also
    whether there is anything to sum inside hosts."""
    kind = transport_kind(transport)
    if kind == "hierarchical" and 1 in (network.hosts, network.ranks_per_host):
        return False
    try:
        ExchangeCurve.of(kind, network)
        if kind in GATHERS:
            gather_stage(kind, network)
    except ClusterError:
        return False
    return True


def num_replicated(gradients: Sequence[Gradient], config: ShardedConfig) -> int:
    """Count the gradients that every rank updates; they are taken to be the first ones in ready
    order.

    Parameters are registered in the opposite of ready order, where a trace does not say how.

    Example:
        >>> ready = [Gradient("head", "", 30), Gradient("body", "", 70)]
        >>> num_replicated(ready, ShardedConfig(replicated=0.33))
        1
    """
    forward = gradients[::-1]
    registered = sorted(forward, key=lambda gradient: gradient.registered)
    sizes = [gradient.num_bytes for gradient in registered]
    return len(sizes) - nearest_border(sizes, 1 - config.replicated)


def updated_part(gradients: Sequence[Gradient], replicated: int, ranks: int) -> float:
    """The part of all bytes that a rank of ``sharded`` updates, and has optimizer state of.

    Example:
        >>> updated_part([Gradient("head", "", 50), Gradient("body", "", 50)], 1, ranks=2)
        0.75
    """
    sizes = [gradient.num_bytes for gradient in gradients]
    whole = sum(sizes[:replicated])
    return (whole + (sum(sizes) - whole) / ranks) / max(sum(sizes), 1)


class ExchangeStage(NamedTuple):
    """One collective of an exchange.

    Attributes:
        kind: of its groups.
        curve: what it costs alone.
        per_byte: seconds for a byte where exchanges under way fill the network.
        share: of the bytes of a segment.
        rounds: as in ``Recipe``.
    """

    kind: GroupKind
    curve: Curve
    per_byte: float
    share: float = 1.0
    rounds: int = 1

    @classmethod
    def of(
        cls, kind: GroupKind, name: CollectiveName, recipe: Recipe, network: NetworkProfile
    ) -> ExchangeStage:
        """The stage on this network.

        Raises:
            ClusterError: its curve was not measured.
        """
        groups = network.groups(kind)
        curve = groups.curve(name)
        per_byte = curve.per_byte
        if recipe.in_order:  # alone, such an exchange leaves the link idle between its rounds
            per_byte = groups.fastest(name)
        if recipe.direct:
            per_byte *= 1 + network.contention(direct=True).crowd_slowdown
        share = 1 / network.ranks_per_host if kind == "inter" else 1.0  # of a sum inside the host
        return cls(kind, curve, per_byte, share, recipe.rounds)


def gather_stage(transport: TransportKind, network: NetworkProfile) -> ExchangeStage:
    """The collective that brings updated parameters together.

    Raises:
        ClusterError: its curve was not measured.
    """
    kind, name = GATHERS[transport]
    return ExchangeStage.of(kind, name, RECIPES[transport], network)


class ExchangeCurve(NamedTuple):
    """Time of a transport for a segment: its stages, one after the other."""

    stages: tuple[ExchangeStage, ...]

    @classmethod
    def of(cls, transport: TransportKind, network: NetworkProfile) -> ExchangeCurve:
        """The stages on this network.

        Where there is nothing to sum inside hosts, ``hierarchical`` is ``direct``. On one host it
        is taken for ``flat``, and so is ``shared_memory`` unless it was measured: both are faster.

        Raises:
            ClusterError: a curve was not measured.
        """
        recipe = RECIPES[transport]
        if recipe.stages[0][0] != "world" and 1 in (network.hosts, network.ranks_per_host):
            recipe = RECIPES["flat" if network.hosts == 1 else "direct"]
        if (
            transport == "shared_memory"
            and recipe.stages[0][1] not in network.networks["world"].curves
        ):
            recipe = RECIPES["flat"]
        return cls(
            tuple(ExchangeStage.of(kind, name, recipe, network) for kind, name in recipe.stages)
        )

    @classmethod
    def of_replicated(cls, network: NetworkProfile) -> ExchangeCurve:
        """Time under ``sharded`` of gradients that every rank updates: an all-reduce by direct
        sends, or by the backend where these cannot be used."""
        return cls.of("direct" if is_priced(DirectConfig(), network) else "flat", network)

    @property
    def latency(self) -> float:
        """Seconds that do not depend on the bytes."""
        return sum(stage.curve.latency for stage in self.stages)

    def seconds_of(self, num_bytes: Array) -> Array:
        """Seconds for each size."""
        parts = [stage.curve.seconds_of(num_bytes * stage.share) for stage in self.stages]
        return np.asarray(np.sum(parts, axis=0))
