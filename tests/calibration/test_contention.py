"""How measured times of computing and exchanging become slowdowns, and what queues cost."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from slipstream.calibration import contention as measuring
from slipstream.calibration.contention import crowd_slowdown, measure_contention
from slipstream.planner.network.costs import Contention
from slipstream.planner.network.curve import Curve
from slipstream.strategy import DirectConfig, FlatConfig, TransportConfig
from slipstream.transport.transport import make_transport
from tests.harness.ranks import Ranks

ALL_REDUCE = Curve.fit([(4096, 1e-3), (8192, 2e-3), (2**20, 0.25)])
LATE = Curve.fit([(2**k, max(1e-3, 8e-3 * 2 ** (k - 21))) for k in range(12, 22)])


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        ranks.run(torch.set_default_dtype, torch.float64)  # as a script may, before it measures
        yield ranks


def where() -> tuple[dist.ProcessGroup, torch.device, TransportConfig]:
    world = dist.group.WORLD
    return world, torch.device("cpu"), make_transport(FlatConfig(), world)


def measure(alone: tuple[float, ...], both: tuple[float, ...], beside: float) -> Contention:
    """What the ranks find if exchanges take so long on each, and a unit computed beside them."""
    rank, original = dist.get_rank(), measuring._ComputeAndExchange._exchange
    times = {False: (alone[rank], 0.0), True: (both[rank], beside)}
    measuring._ComputeAndExchange._exchange = lambda pair, compute: times[compute]
    try:
        return measure_contention(*where(), ALL_REDUCE, 0.02)
    finally:
        measuring._ComputeAndExchange._exchange = original


def test_the_last_rank_counts_for_exchanges_and_all_for_computing(two) -> None:
    results = two.run(measure, (0.2, 0.4), (0.6, 0.3), 30.0)
    assert results == [results[0]] * 2
    assert results[0].exchange_slowdown == results[0].latency_slowdown == 0.5  # 0.6 / 0.4
    assert results[0].compute_slowdown > 1  # 30 s a unit


def measure_each(ratios: dict[int, float]) -> Contention:
    """What is found if exchanges of so many bytes take so many times as long beside computing."""
    original = measuring._ComputeAndExchange._exchange

    def fake(pair: measuring._ComputeAndExchange, compute: bool) -> tuple[float, float]:
        return (ratios[pair._tensors[0].nbytes] if compute else 1.0), 0.0

    measuring._ComputeAndExchange._exchange = fake
    try:
        return measure_contention(*where(), LATE, 0.04)
    finally:
        measuring._ComputeAndExchange._exchange = original


def test_what_slows_latency_is_taken_out_of_what_slows_large_exchanges(two) -> None:
    late, whole = LATE.latency, LATE.seconds(2**21)
    assert 0 < late < whole / 5
    together = (5.0 * late + 1.5 * (whole - late)) / whole
    results = two.run(measure_each, {4096: 5.0, 2**21: together})
    for one in results:
        assert one.latency_slowdown == pytest.approx(4.0, abs=0.01)
        assert one.exchange_slowdown == pytest.approx(0.5, abs=0.01)


def test_nothing_is_sped_up(two) -> None:
    for result in two.run(measure, (0.2, 0.2), (0.1, 0.1), 0.0):
        assert result.compute_slowdown == result.exchange_slowdown == result.latency_slowdown == 0.0


def queue_of(curve: Curve, times: dict[int, list[float]]) -> tuple[float, float]:
    """What is found if beside so many bytes a small exchange takes so long on each rank."""
    original = measuring._one_behind_the_other
    measuring._one_behind_the_other = lambda world, transport, large, small: (
        curve.seconds(large),
        times[large][dist.get_rank()],
    )
    try:
        return measuring._queue(*where(), curve, 0.1)
    finally:
        measuring._one_behind_the_other = original


# 1 ms, 2 ms ... 512 ms: those of 4 to 256 ms are tried with 0.1 s.
STEADY = Curve.fit([(4096 * 2**k, 1e-3 * 2**k) for k in range(10)])


def test_a_queue_is_a_share_of_small_exchanges_and_the_most_of_all(two) -> None:
    times = {
        4096 * 2**k: [min(0.5 * 1e-3 * 2**k, 0.05), min(0.8 * 1e-3 * 2**k, 0.06)] for k in range(10)
    }
    for share, seconds in two.run(queue_of, STEADY, times):
        assert share == pytest.approx(0.8)  # of the rank where it took longer
        assert seconds == pytest.approx(0.06)


def test_where_all_exchanges_are_small_one_waits_for_all_of_the_other(two) -> None:
    flat = Curve.fit([(4096, 1e-3), (8192, 1.1e-3)])
    assert two.run(queue_of, flat, {}) == [(1.0, 1.1e-3)] * 2


def beside(large: int, config: TransportConfig) -> tuple[float, float]:
    with closing(make_transport(config, dist.group.WORLD)) as transport:
        return measuring._one_behind_the_other(dist.group.WORLD, transport, large, 4096)


@pytest.mark.parametrize("config", [FlatConfig(), DirectConfig()], ids=lambda config: config.kind)
def test_a_small_exchange_lands_before_the_large_one_or_with_it(two, config) -> None:
    for large, small in two.run(beside, 2**22, config):
        assert 0.0 < small <= large


def crowd(seconds: tuple[float, ...], per_byte: float) -> tuple[float, int, int]:
    """What is found if a crowd takes so long on each rank; how many exchanges, and their bytes."""
    seen, original = set(), measuring._ComputeAndExchange._exchange

    def fake(pair: measuring._ComputeAndExchange, compute: bool) -> tuple[float, float]:
        assert not compute
        seen.add((len(pair._tensors), pair._tensors[0].nbytes))
        return seconds[dist.get_rank()], 0.0

    measuring._ComputeAndExchange._exchange = fake
    try:
        slowdown = crowd_slowdown(*where(), ALL_REDUCE, per_byte, seconds=0.032)
    finally:
        measuring._ComputeAndExchange._exchange = original
    [(count, num_bytes)] = seen
    return slowdown, count, num_bytes


def test_a_crowd_takes_longer_than_its_bytes_by_what_the_last_rank_measures(two) -> None:
    # 16 exchanges of 8192 bytes take 32 ms one by one, and at the rate of the link 1 s.
    link = 1 / (16 * 8192)
    assert two.run(crowd, (1.0, 1.25), link) == [(0.25, 16, 8192)] * 2
    assert two.run(crowd, (0.5, 0.5), link) == [(0.0, 16, 8192)] * 2


def of_a_crowd() -> float:
    with closing(make_transport(DirectConfig(), dist.group.WORLD)) as transport:
        world, device = dist.group.WORLD, torch.device("cpu")
        return crowd_slowdown(world, device, transport, ALL_REDUCE, 1e-12, 0.05)


def test_a_crowd_of_direct_sends_is_timed_alike_on_all_ranks(two) -> None:
    slower, same = two.run(of_a_crowd)
    assert slower == same > 0


def of_direct_sends() -> Contention:
    with closing(make_transport(DirectConfig(), dist.group.WORLD)) as transport:
        device = torch.device("cpu")
        return measure_contention(dist.group.WORLD, device, transport, ALL_REDUCE, 0.02)


def test_direct_sends_contend_in_their_own_way(two) -> None:
    results = two.run(of_direct_sends)
    assert results == [results[0]] * 2
    assert min(dict(results[0]).values()) >= 0.0


def traffic() -> tuple[list[int], Contention]:
    """Bytes of each exchange, and what was found."""
    sizes, original = [], dist.all_reduce

    def watched(tensor, *where, **options):
        if options.get("async_op"):
            sizes.append(tensor.nbytes)
        return original(tensor, *where, **options)

    dist.all_reduce = watched
    try:
        contention = measure_contention(*where(), ALL_REDUCE, 0.02)
    finally:
        dist.all_reduce = original
    return sizes, contention


def test_exchanges_are_of_a_size_that_fits_the_time(two) -> None:
    for sizes, contention in two.run(traffic):
        assert set(sizes) == {4096, 8192}  # four of 2 ms are done in 20 ms, four of 250 ms are not
        # 20 ms of the large ones, 5 ms of the small ones, alone and beside computing
        assert sizes.count(8192) == measuring.ROUNDS * 2 * 10
        assert sizes.count(4096) == measuring.ROUNDS * 2 * 5
        assert (
            min(
                contention.compute_slowdown,
                contention.exchange_slowdown,
                contention.latency_slowdown,
            )
            >= 0.0
        )
