"""Calibration on live ranks: what is measured, that all ranks agree, and that no group is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.calibration import calibrate as calibration, collective_timer, half_speed
from slipstream.calibration.calibrate import calibrate
from slipstream.cluster.connect import connect, from_environ
from slipstream.errors import ClusterError, ExchangeError
from slipstream.planner.network.costs import CodecCost, Contention, HalfSpeed
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy import HalfConfig
from tests.harness.counters import collectives
from tests.harness.ranks import PerRank

SIZES = (1000, 4096, 50_000)


def measure(hosts: str = "", **options: Any) -> tuple[NetworkProfile, int]:
    """What a rank measures, its ranks on hosts named by a letter each, and the groups left."""
    ranks = connect(from_environ(), "cpu")
    if hosts:
        ranks = replace(ranks, hosts=tuple(hosts))
    profile = calibrate(ranks, **{"sizes": SIZES, "rounds": 2, "seconds": 2.0} | options)
    return profile, len(dist.distributed_c10d._world.pg_map)


def measure_curves(
    hosts: str, curves: Any = None, sizes: tuple[int, ...] = SIZES
) -> tuple[NetworkProfile, int]:
    """The same without contention, with time enough for all sizes on a busy machine."""
    zeros = Contention(**dict.fromkeys(Contention.model_fields, 0.0))
    with pytest.MonkeyPatch.context() as replaced:
        replaced.setattr(calibration, "measure_contention", lambda *_: zeros)
        replaced.setattr(calibration, "crowd_slowdown", lambda *_: 0.25)
        return measure(hosts, seconds=100.0, curves=curves, sizes=sizes)


def measure_sizes(sizes: tuple[int, ...]) -> NetworkProfile:
    return measure(sizes=sizes)[0]


SHAPES = {
    "one host": ("aaaa", {"world": 4}, 4),
    "a rank a host": ("abcd", {"world": 4}, 1),
    "two and two": ("aabb", {"world": 4, "intra": 2, "inter": 2}, 2),
    "in turn": ("abab", {"world": 4, "intra": 2, "inter": 2}, 2),
    "uneven": ("aaab", {"world": 4}, 3),
}


@pytest.mark.parametrize(("hosts", "kinds", "per_host"), SHAPES.values(), ids=SHAPES)
def test_each_kind_of_groups_is_measured_alike_on_all_ranks(four, hosts, kinds, per_host) -> None:
    results = four.run(measure_curves, hosts)
    assert results == [results[0]] * 4
    profile, groups = results[0]
    assert groups == 1  # the world
    assert {kind: network.ranks for kind, network in profile.networks.items()} == kinds
    assert (profile.world_size, profile.hosts) == (4, len(set(hosts)))
    assert profile.ranks_per_host == per_host
    assert (profile.backend, profile.extrapolated) == ("gloo", "")
    assert profile.direct is not None
    assert (profile.crowd_slowdown, profile.direct.crowd_slowdown) == (0.0, 0.25)
    assert profile.versions.keys() == {"slipstream", "torch"}
    for kind, network in profile.networks.items():
        whole = 4 * kinds[kind]  # bytes: an element for each rank
        expected = [-(-size // whole) * whole for size in SIZES]
        for curve in network.curves.values():
            assert [num_bytes for num_bytes, _ in curve.points] == expected


def traffic(curves: Any) -> tuple[NetworkProfile, set[str], int]:
    """What is measured on two hosts of two ranks, which collectives are timed, how many start."""
    timed, original = set(), collective_timer.COLLECTIVES

    def named(name):
        def call(*arguments):
            timed.add(name)
            original[name](*arguments)

        return call

    collective_timer.COLLECTIVES = {name: named(name) for name in original}
    try:
        with collectives() as log:
            profile, _ = measure_curves("aabb", curves)
    finally:
        collective_timer.COLLECTIVES = original
    return profile, timed, len(log)


NARROWED = {
    "flat exchanges": ({"world": ("all_reduce",)}, {"world": {"all_reduce"}}),
    "two in the world": (
        {"world": ("all_reduce", "all_gather")},
        {"world": {"all_reduce", "all_gather"}},
    ),
    "direct sends": (
        {"world": ("direct_all_reduce",)},
        {"world": {"all_reduce", "direct_all_reduce"}},
    ),
    "across hosts": (
        {"inter": ("all_reduce",)},
        {"world": {"all_reduce"}, "inter": {"all_reduce"}},
    ),
}


def measure_half() -> tuple[NetworkProfile, bool]:
    """With the speed of 16-bit weights, and whether the random numbers that follow stay."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    profile, _ = measure(curves={"world": ("all_reduce",)}, half=True)
    return profile, torch.equal(state, torch.get_rng_state())


def test_the_speed_of_16_bits_is_measured_and_random_numbers_stay(two) -> None:
    (profile, same), (other, other_same) = two.run(measure_half)
    assert same
    assert other_same
    assert profile.half_speed == other.half_speed
    assert profile.half_speed is not None
    assert profile.half_speed.of(0.5) > 0


def measure_merging() -> float:
    return measure(curves={"world": ("all_reduce",)}, merging=True)[0].merging


def test_what_a_meeting_computes_is_that_of_the_slowest_rank(two) -> None:
    first, second = two.run(measure_merging)
    assert first == second > 0


def slowest(*speeds: float) -> HalfSpeed:
    """What ranks agree on that measured these: a transformer layer, then blocks of a ResNet."""
    found = iter(speeds)
    with pytest.MonkeyPatch.context() as replaced:
        replaced.setattr(half_speed, "_speed", lambda *_: next(found))
        return half_speed.half_speed(dist.group.WORLD, torch.device("cpu"))


def test_the_speed_of_16_bits_is_that_of_the_slowest_rank(two) -> None:
    speeds = HalfSpeed(dense=2.0, convolutional=1.5)
    assert two.run(slowest, PerRank(2.0, 3.0), PerRank(1.75, 1.5)) == [speeds, speeds]


@pytest.fixture(scope="module")
def all_of_them(four) -> int:
    """How many collectives start where no curve is left out."""
    _, _, number = four.run(traffic, None)[0]
    return number


@pytest.mark.parametrize(("curves", "measured"), NARROWED.values(), ids=NARROWED)
def test_only_the_curves_that_are_asked_for_are_measured(
    four, all_of_them, curves, measured
) -> None:
    profile, timed, few = four.run(traffic, curves)[0]
    assert {kind: set(network.curves) for kind, network in profile.networks.items()} == measured
    assert timed == set().union(*measured.values())
    assert few < all_of_them
    with pytest.raises(ClusterError, match=r"networks\.world\.reduce_scatter was not measured"):
        profile.groups("world").curve("reduce_scatter")


def shares(seconds: float) -> list[float]:
    """The parts of their usual time that a codec and the speed of 16 bits get."""
    got: list[float] = []

    def cost(codec: Any, world: Any, device: Any, share: float) -> CodecCost:
        got.append(share)
        return CodecCost(ratio=0.5)

    def speed(world: Any, device: Any, share: float) -> HalfSpeed:
        got.append(share)
        return HalfSpeed(dense=1.0, convolutional=1.0)

    zeros = Contention(**dict.fromkeys(Contention.model_fields, 0.0))
    options = {"curves": {"world": ("all_reduce",)}, "rounds": 1, "codecs": [HalfConfig()]}
    with (
        patch.object(calibration, "measure_contention", lambda *_: zeros),
        patch.object(calibration, "slowest_cost", cost),
        patch.object(calibration, "half_speed", speed),
    ):
        measure(seconds=seconds, half=True, **options)
    return got


@pytest.mark.parametrize(("seconds", "share"), [(1.5, 0.5), (3.0, 1.0), (20.0, 1.0)])
def test_a_short_measurement_is_short_in_all_its_parts(two, seconds, share) -> None:
    assert two.run(shares, seconds) == [[share] * 2] * 2


def slow(sizes: tuple[int, ...], seconds: float, pauses: tuple[float, float]) -> NetworkProfile:
    """Measure where each rank pauses after every collective."""
    original, pause = collective_timer.COLLECTIVES, pauses[dist.get_rank()]

    def slowed(collective):
        def call(*arguments):
            collective(*arguments)
            time.sleep(pause)

        return call

    collective_timer.COLLECTIVES = {name: slowed(start) for name, start in original.items()}
    try:
        return measure(sizes=sizes, seconds=seconds)[0]
    finally:
        collective_timer.COLLECTIVES = original


def test_the_slowest_rank_counts(two) -> None:
    for profile in two.run(slow, SIZES, 4.0, (0.0, 0.02)):
        for curve in profile.networks["world"].curves.values():
            assert min(seconds for _, seconds in curve.points) >= 0.02


def test_sizes_for_which_there_is_no_time_are_left_out(two) -> None:
    sizes = tuple(1024 * 2**k for k in range(8))
    for profile in two.run(slow, sizes, 0.3, (0.05, 0.05)):
        for curve in profile.networks["world"].curves.values():
            assert [num_bytes for num_bytes, _ in curve.points] == [sizes[0], sizes[4]]


def in_some_megabytes(num_bytes: float) -> float:
    """Seconds of an exchange over a line of a tenth of a second."""
    return 0.1 + num_bytes / 20e6


def after_idle(num_bytes: float) -> float:
    """Seconds of an exchange whose connections begin slowly: twice the bytes every 60 ms."""
    return 0.3 + 0.06 * math.log2(1 + num_bytes / 16384) + num_bytes / 20e6


def far(line: Callable[[float], float], seconds: float) -> NetworkProfile:
    """Measure a line by a clock that knows nothing else."""
    now = 0.0

    def late(whole, part, lanes):
        nonlocal now
        now += line(whole.nbytes)

    collectives = dict.fromkeys(collective_timer.COLLECTIVES, late)
    with (
        patch.object(collective_timer, "COLLECTIVES", collectives),
        patch.object(collective_timer, "perf_counter", lambda: now),
    ):
        return measure(sizes=tuple(1024 * 2**k for k in range(17)), seconds=seconds)[0]


def test_a_long_line_is_measured_as_far_as_its_bytes_show(two) -> None:
    for profile in two.run(far, in_some_megabytes, 1.5):
        curve = profile.networks["world"].all_reduce
        assert len(curve.points) <= 5
        assert curve.seconds(64 * 2**20) == pytest.approx(in_some_megabytes(64 * 2**20), rel=1e-3)


def test_a_line_that_begins_slowly_is_not_taken_for_one_of_little_bandwidth(two) -> None:
    for profile in two.run(far, after_idle, 1.5):
        curve = profile.networks["world"].all_reduce
        assert curve.seconds(4 * 2**20) == pytest.approx(after_idle(4 * 2**20), rel=0.05)


@pytest.mark.parametrize(
    ("once", "blocks", "seconds"),
    [
        (2.0, [], 2.0),
        (0.5, [0.3, 0.4], 0.4),  # so long that warming up means little: it counts
        (0.05, [0.01, 0.03], 0.02),
        (0.001, [0.004, 0.002, 0.009, 0.003, 0.001], 0.003),
        (0.001, [], 0.001),
    ],
)
def test_a_size_takes_the_median(once: float, blocks: list[float], seconds: float) -> None:
    timing = collective_timer.Timing(print, 1024, once, blocks)
    assert timing.seconds == pytest.approx(seconds)
    assert timing.num_bytes == 4096
    assert timing.repeat * once <= max(once, 0.011)
    assert (timing.wanted == 0) == (once > 1)


def test_equal_sizes_after_rounding_up_count_once(four) -> None:
    profile, _ = four.run(measure_curves, "", None, (1, 16, 17, 32, 100))[0]
    points = profile.networks["world"].all_reduce.points
    assert [num_bytes for num_bytes, _ in points] == [16, 32, 112]


def progress() -> list[tuple[float, str]]:
    said: list[tuple[float, str]] = []
    measure(progress=lambda share, what: said.append((share, what)))
    return said


def test_progress_rises_to_one_and_says_what_is_done(two) -> None:
    said = two.run(progress)[0]
    shares = [share for share, _ in said]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 1 / 3
    assert shares[-1] == 1.0
    assert list(dict.fromkeys(what for _, what in said)) == [
        "world all_reduce",
        "world direct_all_reduce",
        "world reduce_scatter",
        "world all_gather",
        "compute beside an exchange",
    ]


def all_reduced() -> set[int]:
    """Bytes of the tensors that are timed under another default dtype."""
    ranks = connect(from_environ(), "cpu")
    with collectives() as log:
        torch.set_default_dtype(torch.float64)
        try:
            timer = collective_timer.CollectiveTimer(ranks, SIZES, rounds=1)
            timer.curve("all_reduce", timer.world, 0.1)
        finally:
            torch.set_default_dtype(torch.float32)
    return {one.num_bytes for one in log if one.num_bytes > 100}


def test_tensors_have_their_bytes_under_any_default_dtype(two) -> None:
    for sizes in two.run(all_reduced):
        assert sizes
        assert sizes <= {*SIZES}


def test_a_rank_that_is_gone_ends_the_others_with_an_error(two) -> None:
    assert isinstance(two.fail(leave)[0], ExchangeError)


def leave() -> None:
    ranks = connect(from_environ(), "cpu")
    if ranks.rank == 1:
        dist.destroy_process_group()
        del ranks  # the last reference: only now its connections close
        raise KeyError("this rank goes")
    calibrate(ranks, sizes=SIZES)


def test_one_rank_has_no_network() -> None:
    with pytest.raises(ClusterError, match="1 rank has no network"):
        calibrate(connect(from_environ(), "cpu"))


@pytest.mark.parametrize("sizes", [(), (4096,), (8, 8), (0, 8)])
def test_too_few_sizes(two, sizes) -> None:
    errors = two.fail(measure_sizes, sizes)
    assert {type(error) for error in errors.values()} == {ClusterError}
    assert all("two or more different numbers" in str(error) for error in errors.values())
