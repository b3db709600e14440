"""Networks with known laws, for tests of predictions on them."""

from __future__ import annotations

from typing import Any

from slipstream.planner.network.costs import Contention
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import GroupKind, Network, NetworkProfile

MB = 2**20
SIZES = tuple(sorted({2**k for k in range(10, 27)} | {3 * 2**k for k in range(9, 25)}))


def contention(
    compute: float = 0.0,
    exchange: float = 0.0,
    latency: float = 0.0,
    queue_share: float = 0.0,
    queue_seconds: float = 0.0,
) -> Contention:
    """Nothing slows down anything else, except as given."""
    return Contention(
        compute_slowdown=compute,
        exchange_slowdown=exchange,
        latency_slowdown=latency,
        queue_share=queue_share,
        queue_seconds=queue_seconds,
    )


def profile(networks: dict[GroupKind, Network], **fields: Any) -> NetworkProfile:
    """A profile of these networks: a rank a host and no contention, except as given."""
    ranks = networks["world"].ranks
    values: dict[str, Any] = {
        **dict(contention()),
        "world_size": ranks,
        "hosts": ranks,
        "ranks_per_host": 1,
        "networks": networks,
        "sharding_seconds": 0.0,
        "backend": "gloo",
        "date": "2026-11-21 07:00",
        "versions": {"torch": "2.13.0"},
    }
    return NetworkProfile(**values | fields)


def ring_curve(ranks: int, latency: float, per_byte: float, rounds: int = 2) -> Curve:
    """``rounds`` times ``p - 1`` messages of ``1 / p`` of the bytes each."""
    startup, slope = (ranks - 1) * latency, (ranks - 1) / ranks * per_byte
    return Curve.fit([(m, rounds * (startup + slope * m)) for m in SIZES])


def ring(kind: GroupKind, ranks: int, latency: float, per_byte: float) -> Network:
    """A network whose all-reduce costs twice what the others do."""
    once = ring_curve(ranks, latency, per_byte, rounds=1)
    twice = ring_curve(ranks, latency, per_byte)
    curves = {"all_reduce": twice, "direct_all_reduce": twice}
    return Network(kind=kind, ranks=ranks, **curves, reduce_scatter=once, all_gather=once)


def ring_profile(hosts: int = 4, ranks_per_host: int = 1, **changes: Any) -> NetworkProfile:
    """Links of 1 Gbit/s (8 ns a byte, 50 us) between hosts, 1 ns a byte and 5 us inside a host."""
    world = hosts * ranks_per_host
    between, inside = (50e-6, 8e-9), (5e-6, 1e-9)
    networks: dict[GroupKind, Network] = {
        "world": ring("world", world, *(between if hosts > 1 else inside))
    }
    if hosts > 1 and ranks_per_host > 1:
        networks["intra"] = ring("intra", ranks_per_host, *inside)
        networks["inter"] = ring("inter", hosts, 50e-6, ranks_per_host * 8e-9)
    fields: dict[str, Any] = {
        **dict(contention(0.25, 0.5, 0.5, 0.5, 0.1)),
        "networks": networks,
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
    }
    return profile(**fields | changes)


def ethernet_profile(
    ranks: int = 4, gigabits: float = 1.0, slowdown: float = 0.0, latency: float = 4e-3
) -> NetworkProfile:
    """A ring of hosts of one rank over links of so many Gbit/s, with a latency that stays."""
    sizes = [2**power for power in range(10, 27)]
    per_byte = 2 * (ranks - 1) / ranks * 8e-9 / gigabits
    whole = Curve.fit((size, latency + per_byte * size) for size in sizes)
    half = Curve.fit((size, (latency + per_byte * size) / 2) for size in sizes)
    world = Network(
        kind="world", ranks=ranks, all_reduce=whole, reduce_scatter=half, all_gather=half
    )
    slowdowns = contention(slowdown, slowdown / 2, slowdown / 2, 0.5, 0.1)
    return profile({"world": world}, **dict(slowdowns))


def linear_profile(
    ranks: int = 4, seconds: float = 0.1, latency: float = 0.0, **changes: Any
) -> NetworkProfile:
    """An all-reduce takes ``latency``, and ``seconds`` for each MB; its halves half of that."""
    whole, half = (
        Curve.fit((size * MB, share * (latency + seconds * size)) for size in (1, 2, 4, 8, 16, 32))
        for share in (1.0, 0.5)
    )
    world = Network(
        kind="world", ranks=ranks, all_reduce=whole, reduce_scatter=half, all_gather=half
    )
    return profile({"world": world}, **changes)
