"""Formulas of scale-out against plain references that follow each message, stage and rank."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from slipstream.planner.network.curve import Curve
from slipstream.planner.scale_out.collectives import (
    LinkSpeed,
    fabric_profile,
    network,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    uplink_slowdown,
)
from slipstream.planner.scale_out.pipeline import one_f_one_b
from slipstream.planner.scale_out.shape import FabricConfig
from slipstream.planner.scale_out.stragglers import slowest
from slipstream.planner.scale_out.transformer import (
    head_seconds,
    layer_seconds,
    profile,
    workload,
)
from tests.planner.networks import ring_profile
from tests.planner.scale_out.shapes import shape

LINK = LinkSpeed(latency=1e-5, rate=1e9)


# Collectives.


def ring_by_messages(num_bytes: float, ranks: int, rounds: int) -> float:
    """Every rank sends a part to the next one, and waits for that of the one before."""
    free = [0.0] * ranks
    for _ in range(rounds * (ranks - 1)):
        arrives = [free[rank - 1] + LINK.send(num_bytes / ranks) for rank in range(ranks)]
        free = [max(own, other) for own, other in zip(free, arrives, strict=True)]
    return max(free)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 17])
def test_a_ring_takes_as_long_as_its_messages(ranks: int) -> None:
    assert ring_all_reduce(1e6, ranks, LINK) == pytest.approx(ring_by_messages(1e6, ranks, 2))
    assert ring_reduce_scatter(1e6, ranks, LINK) == pytest.approx(ring_by_messages(1e6, ranks, 1))


def tree_by_messages(pieces: int, piece: float, ranks: int) -> float:
    """Pieces go up and down a binary tree, one after the other on each of its levels."""
    levels = math.ceil(math.log2(ranks))
    left = [0.0] * (2 * levels)
    for _ in range(pieces):
        at = 0.0
        for hop in range(2 * levels):
            start = max(at, left[hop])
            left[hop] = start + piece / LINK.rate
            at = start + LINK.send(piece)
    return at


@pytest.mark.parametrize("ranks", [2, 5, 64, 1000])
def test_a_tree_takes_as_long_as_its_pieces(ranks: int) -> None:
    """Both ways share a rank's link: of the whole, up and down, each byte is sent twice."""
    pieces, size = 4000, 64e6
    followed = tree_by_messages(pieces, 2 * size / pieces, ranks)
    assert tree_all_reduce(size, ranks, LINK) == pytest.approx(followed, rel=0.01)
    assert tree_all_reduce(0, ranks, LINK) == pytest.approx(tree_by_messages(1, 0, ranks))


@pytest.mark.parametrize("size", [1e3, 3e5, 1e7, 5e9, 1e12])
def test_an_all_reduce_takes_the_faster_of_ring_and_tree(size: float) -> None:
    curve = network("world", 512, LINK).all_reduce
    fastest = min(ring_all_reduce(size, 512, LINK), tree_all_reduce(size, 512, LINK))
    assert curve.seconds(size) == pytest.approx(fastest, rel=0.03)
    assert curve.fitted(size) == pytest.approx(fastest)
    alone = network("world", 512, LINK, backend="gloo").all_reduce
    assert alone.fitted(size) == pytest.approx(ring_all_reduce(size, 512, LINK))


def test_one_rank_exchanges_nothing() -> None:
    curves = network("world", 1, LINK).curves.values()
    assert max(curve.seconds(size) for curve in curves for size in (1, 1e6, 1e12)) < 1e-20


def test_one_replica_on_two_hosts_exchanges_nothing() -> None:
    network = profile(shape(parallel={"tensor": 16}), 16)
    assert network.world_size == 1
    assert network.groups("world").all_reduce.seconds(2**20) < 1e-9


def test_direct_sends_wait_for_the_uplinks_of_racks_and_rings_do_not() -> None:
    fabric = FabricConfig(hosts_per_rack=4, oversubscription=8.0)
    # Of the 15 others 12 are in other racks, where an eighth of the rate is left.
    assert uplink_slowdown(16, fabric) == pytest.approx(8 * 12 / 15)
    assert uplink_slowdown(4, fabric) == uplink_slowdown(16, FabricConfig(hosts_per_rack=4)) == 1.0
    before = ring_profile(hosts=2, ranks_per_host=2).scaled(16, 2)
    after = fabric_profile(before, fabric)

    def large(name: str, kind: str = "world") -> float:
        curves: list[Curve] = [p.networks[kind].curves[name] for p in (before, after)]
        return curves[1].seconds(2**26) / curves[0].seconds(2**26)

    assert large("all_reduce") == 1.0
    assert large("direct_all_reduce") == pytest.approx(6.4, rel=0.05)
    assert large("direct_all_reduce", "inter") == pytest.approx(6.4, rel=0.05)
    assert large("direct_all_reduce", "intra") == 1.0


def test_nccl_takes_trees_where_rings_of_many_ranks_are_slow() -> None:
    ring = ring_profile(hosts=4).scaled(1024, 1)
    tree = fabric_profile(ring.model_copy(update={"backend": "nccl"}), FabricConfig())
    small, large = 1024, 2**26

    def times(size: int) -> float:
        curves = (profile.networks["world"].all_reduce for profile in (ring, tree))
        slow, fast = (curve.seconds(size) for curve in curves)
        return slow / fast

    assert times(small) == pytest.approx(1023 / 10, rel=0.05)
    assert times(large) >= 1.0


# Pipelines.


def followed(stages: list[float], micro_batches: int) -> float:
    """Each stage computes forwards and backwards in the order of 1F1B, when what it needs is there.

    Forward takes a third of a stage's time.
    """
    count = len(stages)
    order = []
    for stage in range(count):
        ahead = min(count - 1 - stage, micro_batches)
        steps = [("f", i) for i in range(ahead)]
        for i in range(micro_batches - ahead):
            steps += [("f", ahead + i), ("b", i)]
        order.append(steps + [("b", i) for i in range(micro_batches - ahead, micro_batches)])
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * count, [0] * count
    while any(at[stage] < len(order[stage]) for stage in range(count)):
        for stage in range(count):
            while at[stage] < len(order[stage]):
                kind, micro = order[stage][at[stage]]
                if kind == "f":
                    needs = ("f", stage - 1, micro) if stage else None
                else:
                    needs = ("b", stage + 1, micro) if stage < count - 1 else ("f", stage, micro)
                if needs is not None and needs not in ends:
                    break
                start = max(free[stage], ends[needs] if needs else 0.0)
                free[stage] = start + stages[stage] * (1 / 3 if kind == "f" else 2 / 3)
                ends[kind, stage, micro] = free[stage]
                at[stage] += 1
    return max(free)


@pytest.mark.parametrize(("stages", "micro"), [*product([1, 2, 3, 8], [1, 2, 5, 16])])
def test_one_f_one_b_takes_as_long_as_its_stages(stages: int, micro: int) -> None:
    equal = [3.0] * stages
    assert one_f_one_b(equal, micro) == pytest.approx(followed(equal, micro))
    assert one_f_one_b(equal, micro) == pytest.approx(3.0 * (micro + stages - 1))
    head = [3.0] * (stages - 1) + [4.5]
    assert one_f_one_b(head, micro) == pytest.approx(followed(head, micro))


# Stragglers.


@pytest.mark.parametrize(("ranks", "spread"), [(1, 0.1), (8, 0.05), (512, 0.05), (4096, 0.2)])
def test_the_slowest_of_many_ranks_is_that_of_a_draw(ranks: int, spread: float) -> None:
    draws = np.random.default_rng(0).standard_normal((500, ranks))
    drawn = np.exp(spread * draws - spread**2 / 2).max(axis=1).mean()
    assert slowest(ranks, FabricConfig(jitter=spread)) == pytest.approx(drawn, rel=0.01)
    assert slowest(ranks, FabricConfig(unequal=spread)) == slowest(
        ranks, FabricConfig(jitter=spread)
    )


def test_meeting_rarely_evens_out_jitter_and_not_slow_ranks() -> None:
    draws = np.random.default_rng(1).standard_normal((200, 64, 16))
    means = np.exp(0.2 * draws - 0.02).mean(axis=2).max(axis=1).mean()
    assert slowest(64, FabricConfig(jitter=0.2), updates=16) == pytest.approx(means, rel=0.02)
    slow = FabricConfig(unequal=0.2)
    assert slowest(64, slow, updates=16) == slowest(64, slow)


def test_more_ranks_are_never_faster() -> None:
    times = [slowest(ranks, FabricConfig(jitter=0.1)) for ranks in (1, 2, 64, 100, 4096, 10**6)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(1.0)
    assert slowest(4096, FabricConfig()) == 1.0


# Computing.


def test_operations_are_those_of_the_paper() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), of Narayanan et al. 2021, on links that cost nothing.

    The paper counts the output layer once more, as if it were computed again, too.
    """
    free = {"memory_gbytes": 1e12, "inside_gbytes": 1e12, "inside_us": 0.0}
    given = shape(machine=free, parallel={"tensor": 4})
    hidden, layers, sequence, vocabulary = 1024, 24, 1024, 32_000
    factor = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    operations = 96 * 2 * sequence * layers * hidden**2 * factor
    seconds = layers * layer_seconds(given) + head_seconds(given)
    assert seconds * 4 * 100e12 == pytest.approx(operations, rel=1e-6)


def test_the_gradients_of_a_stage_are_its_parameters() -> None:
    given = shape(parallel={"tensor": 2, "pipeline": 4})
    parameters = (12 * 1024**2 * 24 / 4 + 1024 * 32_000) / 2
    work = workload(given, 64)
    assert sum(gradient.num_bytes for gradient in work.gradients) == 2 * parameters
    assert work.num_ranks == 8
    assert work.samples.sum() == 8192
