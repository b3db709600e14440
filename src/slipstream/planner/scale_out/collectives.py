"""Time of collectives of many ranks on links of known latency and rate, as curves.

With p ranks and n bytes, on links of latency a and rate B, one after the other:

    ring:  2 (p - 1) a + 2 (p - 1) / p * n / B      a reduce-scatter or an all-gather: half of it
    tree:  2 ceil(log2 p) a + 2 n / B               up and down, in pieces that follow each other

Neighbours in a ring are neighbours in a rack, so a ring crosses the uplink of a rack once, however
many hosts share it. Direct sends go from every rank to every other, so most of their bytes do.

Sources: Thakur, Rabenseifner and Gropp 2005 (ring); Sanders, Speck and Traeff 2009 (tree).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.planner.network.curve import Curve, Piece
from slipstream.planner.network.profile import (
    ROUNDS,
    CollectiveName,
    GroupKind,
    Network,
    NetworkProfile,
)
from slipstream.planner.scale_out.shape import Backend, FabricConfig

_SIZES = tuple(2**power for power in range(6, 37))
"""Bytes of the points of a curve."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A way between two ranks that are neighbours.

    Attributes:
        latency: seconds until a message begins to arrive.
        rate: bytes/s, in each direction.
    """

    latency: float
    rate: float

    def send(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency + num_bytes / self.rate


def ring_all_reduce(num_bytes: float, ranks: int, link: LinkSpeed) -> float:
    """Compute the seconds of an all-reduce by a ring.

    Example:
        >>> round(ring_all_reduce(4e6, 4, LinkSpeed(latency=0.001, rate=1e9)), 9)
        0.012
    """
    return 2 * (ranks - 1) * link.send(num_bytes / ranks)


def ring_reduce_scatter(num_bytes: float, ranks: int, link: LinkSpeed) -> float:
    """Compute the seconds of a reduce-scatter, or of an all-gather, by a ring.

    Example:
        >>> round(ring_reduce_scatter(4e6, 4, LinkSpeed(latency=0.001, rate=1e9)), 9)
        0.006
    """
    return (ranks - 1) * link.send(num_bytes / ranks)


def tree_all_reduce(num_bytes: float, ranks: int, link: LinkSpeed) -> float:
    """Compute the seconds of an all-reduce by a tree, whose pieces follow each other.

    Example:
        >>> round(tree_all_reduce(4e6, 4, LinkSpeed(latency=0.001, rate=1e9)), 9)
        0.012
    """
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency + 2 * num_bytes / link.rate


def uplink_slowdown(hosts: int, fabric: FabricConfig) -> float:
    """Compute how many times as long direct sends take, as racks share their uplinks.

    Of what a host sends to all others, the part that leaves its rack is
    ``(hosts - hosts_per_rack) / (hosts - 1)``, and ``1 / oversubscription`` of the host's rate is
    there for it.

    Args:
        hosts: that exchange.
        fabric: racks and their uplinks.

    Example:
        >>> uplink_slowdown(31, FabricConfig(hosts_per_rack=16, oversubscription=4.0))
        2.0
    """
    if fabric.hosts_per_rack is None or hosts <= fabric.hosts_per_rack:
        return 1.0
    leaving = (hosts - fabric.hosts_per_rack) / (hosts - 1)
    return max(1.0, leaving * fabric.oversubscription)


def network(
    kind: GroupKind,
    ranks: int,
    link: LinkSpeed,
    *,
    direct: float = 1.0,
    backend: Backend = "nccl",
) -> Network:
    """Build the curves of groups of ``ranks`` on links of one kind.

    Args:
        kind: of groups.
        ranks: of a group.
        link: between neighbours.
        direct: how many times as long direct sends take as a ring.
        backend: NCCL takes a tree for an all-reduce where that is faster.
    """
    share = (ranks - 1) / ranks
    ring = 2 * (ranks - 1) * link.latency, 2 * share / link.rate
    tree = tree_all_reduce(0, ranks, link), 2 * share and 2 / link.rate
    crowded = dict.fromkeys(_straight(backend), direct)

    def curve(name: CollectiveName) -> Curve:
        startup, per_byte = (value * ROUNDS[name] / 2 for value in ring)
        return _curve((startup, per_byte * crowded.get(name, 1.0)))

    return Network(
        kind=kind,
        ranks=ranks,
        all_reduce=_curve(tree, ring) if backend == "nccl" else _curve(ring),
        direct_all_reduce=curve("direct_all_reduce"),
        reduce_scatter=curve("reduce_scatter"),
        all_gather=curve("all_gather"),
        crowded=crowded if direct > 1 else None,
    )


def _straight(backend: str) -> tuple[CollectiveName, ...]:
    """Collectives in which every rank sends to every other one."""
    halves: tuple[CollectiveName, ...] = ("reduce_scatter", "all_gather")
    return ("direct_all_reduce", *(() if backend == "nccl" else halves))


def machines(
    networks: Mapping[GroupKind, Network],
    hosts: int,
    ranks_per_host: int,
    backend: Backend = "nccl",
) -> NetworkProfile:
    """Build the profile of machines that compute as fast beside an exchange.

    Args:
        networks: of all ranks, and of those inside and between hosts.
        hosts, ranks_per_host: whose product is the number of ranks.
        backend: of the ranks.
    """
    return NetworkProfile(
        world_size=hosts * ranks_per_host,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        networks=networks,
        compute_slowdown=0.0,
        exchange_slowdown=0.0,
        latency_slowdown=0.0,
        queue_share=0.0,
        queue_seconds=0.0,
        backend=backend,
        date="",
        versions={},
        extrapolated="computed from the shape of a training",
    )


def fabric_profile(profile: NetworkProfile, fabric: FabricConfig) -> NetworkProfile:
    """Put racks, and trees where the backend has them, into an extrapolated profile.

    Args:
        profile: of as many hosts as it is for, as `NetworkProfile.scaled` makes it.
        fabric: racks and their uplinks.
    """
    slowdown = uplink_slowdown(profile.hosts, fabric)
    trees = profile.backend == "nccl"
    if slowdown == 1.0 and not trees:
        return profile
    straight = _straight(profile.backend)
    networks = {}
    for kind, groups in profile.networks.items():
        crosses = kind != "intra" and slowdown > 1.0
        curves = {
            name: curve.scaled(1.0, slowdown) if crosses and name in straight else curve
            for name, curve in groups.curves.items()
        }
        if trees:
            curves["all_reduce"] = _with_tree(curves["all_reduce"], groups.ranks)
        crowded = dict.fromkeys(straight, slowdown) if crosses else None
        networks[kind] = Network(kind=kind, ranks=groups.ranks, **curves, crowded=crowded)
    return profile.model_copy(update={"networks": networks})


def _with_tree(curve: Curve, ranks: int) -> Curve:
    """The faster of a ring and of a tree on the same links, at each size."""
    if ranks < 3:
        return curve
    tree = curve.scaled(math.ceil(math.log2(ranks)) / (ranks - 1), ranks / (ranks - 1))
    sizes = (size for size, _ in curve.points)
    return Curve.fit((size, min(curve.seconds(size), tree.seconds(size))) for size in sizes)


def _curve(*lines: tuple[float, float]) -> Curve:
    """The fastest of lines, by startup and seconds a byte, each with fewer of these than the one
    before."""
    pieces: list[Piece] = []
    for startup, per_byte in lines:
        start = 0
        if pieces:
            before = pieces[-1]
            if per_byte >= before.per_byte:
                continue
            start = math.ceil((startup - before.startup) / (before.per_byte - per_byte))
        if pieces and start <= pieces[-1].start_bytes:
            pieces.pop()
            start = 0
        pieces.append(Piece(start_bytes=start, startup=startup, per_byte=per_byte))
    points = tuple((size, min(a + b * size for a, b in lines)) for size in _SIZES)
    return Curve(points=points, pieces=tuple(pieces), error_by_decade={}, trusted=True)
