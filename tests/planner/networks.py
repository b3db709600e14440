"""Clusters that behave as a ring does by the book, for tests of what is planned on them."""

from __future__ import annotations

from typing import Any

from slipstream.planner.cost import Curve, Kind, Network, NetworkProfile

SIZES = tuple(sorted({2**k for k in range(10, 27)} | {3 * 2**k for k in range(9, 25)}))


def ring(ranks: int, latency: float, per_byte: float, rounds: int = 2) -> Curve:
    """``rounds`` times ``p - 1`` messages of ``1 / p`` of the bytes each."""
    startup, slope = (ranks - 1) * latency, (ranks - 1) / ranks * per_byte
    return Curve.fit([(m, rounds * (startup + slope * m)) for m in SIZES])


def network(kind: Kind, ranks: int, latency: float, per_byte: float) -> Network:
    """A network whose all-reduce costs twice what the others do."""
    once = ring(ranks, latency, per_byte, rounds=1)
    twice = ring(ranks, latency, per_byte)
    return Network(kind=kind, ranks=ranks, all_reduce=twice, reduce_scatter=once, all_gather=once)


def cluster(hosts: int = 4, ranks_per_host: int = 1, **changes: Any) -> NetworkProfile:
    """Links of 1 Gbit/s (8 ns a byte, 50 us), 1 ns a byte and 5 us inside a host."""
    world = hosts * ranks_per_host
    between, inside = (50e-6, 8e-9), (5e-6, 1e-9)
    networks = {"world": network("world", world, *(between if hosts > 1 else inside))}
    if hosts > 1 and ranks_per_host > 1:
        networks["intra"] = network("intra", ranks_per_host, *inside)
        networks["inter"] = network("inter", hosts, 50e-6, ranks_per_host * 8e-9)
    values: dict[str, Any] = {
        "world_size": world,
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "networks": networks,
        "compute_slowdown": 0.25,
        "exchange_slowdown": 0.5,
        "latency_slowdown": 0.5,
        "queue_share": 0.5,
        "queue_seconds": 0.1,
        "backend": "gloo",
        "date": "2026-11-21 07:00",
        "versions": {"torch": "2.13.0"},
    }
    return NetworkProfile(**values | changes)
