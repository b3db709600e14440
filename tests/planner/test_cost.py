"""Curves through measured points, networks of other sizes, and the file that stores them."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings, strategies as st

from slipstream.errors import ClusterError
from slipstream.planner.network import fit
from slipstream.planner.network.curve import Curve, Piece
from slipstream.planner.network.profile import FRAMES, Network, NetworkProfile
from tests.planner.networks import SIZES, profile, ring, ring_curve, ring_profile

SHAPES = {
    "one line": (1, lambda m: 1e-4 + 1e-8 * m),
    "only latency": (1, lambda m: 1e-4 + 0 * m),
    "only bandwidth": (1, lambda m: 1e-8 * m),
    "the larger of two": (2, lambda m: np.maximum(1e-4, 1e-9 * m)),
    "large ones are cheaper": (2, lambda m: np.minimum(1e-4 + 2e-8 * m, 2e-3 + 8e-9 * m)),
    "three": (3, lambda m: np.maximum(np.minimum(1e-4 + 1e-8 * m, 1e-3), 1e-9 * m)),
}
points = st.lists(
    st.tuples(st.integers(1, 2**27), st.floats(1e-6, 10.0)),
    min_size=2,
    max_size=12,
    unique_by=lambda point: point[0],
)


@pytest.mark.parametrize(("pieces", "truth"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_lines_are_found(pieces: int, truth, noise: float) -> None:
    random = np.random.default_rng(0)
    times = [float(truth(m) * (1 + noise * random.standard_normal())) for m in SIZES]
    curve = Curve.fit(zip(SIZES, times, strict=True))
    assert len(curve.pieces) == pieces
    assert curve.trusted
    for m in SIZES[1::2]:
        assert curve.fitted(m) == pytest.approx(truth(m), rel=1e-3 + 3 * noise)


@settings(deadline=None)
@given(points)
def test_lines_meet_never_fall_and_say_how_far_they_are_off(measured) -> None:
    curve = Curve.fit(measured)
    assert curve.points == tuple(sorted(measured))
    for one, other in pairwise(curve.pieces):
        knot = other.start_bytes  # a whole byte, next to where the lines meet
        gap = abs(one.startup + one.per_byte * knot - other.startup - other.per_byte * knot)
        assert gap <= max(one.per_byte, other.per_byte) + 1e-5 * curve.fitted(knot)
    errors = [abs(curve.fitted(m) / t - 1) for m, t in curve.points]
    assert curve.worst_error == pytest.approx(max(errors), abs=1e-4)
    assert curve.trusted == (curve.worst_error <= 0.15)


def dissect(count: int, least: int):
    """Every division of ``count`` points into runs of at least ``least``."""
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            runs = list(pairwise([0, *inner, count]))
            if all(stop - start >= least for start, stop in runs):
                yield runs


def squares(sizes, times) -> float:
    """Squared relative error of the best line whose parts are not negative, by trying."""
    columns = np.stack([1 / times, sizes / times], axis=1)
    best = np.inf
    for use in ([0, 1], [0], [1]):
        parts = np.linalg.lstsq(columns[:, use], np.ones(len(times)), rcond=None)[0]
        if (parts >= 0).all():
            best = min(best, float(((columns[:, use] @ parts - 1) ** 2).sum()))
    return best


@settings(max_examples=50, deadline=None)
@given(points)
def test_the_points_are_divided_best(measured) -> None:
    sizes, times = np.array(sorted(measured), dtype=float).T
    count = len(sizes)
    costs = {
        (start, stop): squares(sizes[start:stop], times[start:stop]) + fit.PENALTY
        for start, stop in combinations(range(count + 1), 2)
    }
    lines = fit._free_lines(sizes, times)
    error = sum(costs[line.first, line.stop] for line in lines)
    divisions = dissect(count, min(fit.LEAST_POINTS, count))
    best = min(sum(costs[run] for run in runs) for runs in divisions)
    assert error <= best + 1e-4 * len(lines)


def test_no_lines_that_meet_are_nearer() -> None:
    random = np.random.default_rng(1)
    sizes = np.array(SIZES, dtype=float)
    ends = sizes[[0, 9, 20, -1]]

    def off(values) -> float:
        return float(((np.interp(sizes, ends, values) / times - 1) ** 2).sum())

    def allowed(values) -> bool:
        return bool((np.diff(values) >= 0).all() and (np.diff(values / ends) <= 0).all())

    for _ in range(20):
        times = 1e-4 * np.exp(np.sort(random.normal(0, 2, len(sizes))))
        fitted = fit._joined(sizes, times, ends)
        assert (np.diff(fitted) >= 0).all()
        assert (np.diff(fitted / ends) <= 1e-9 * fitted[:-1] / ends[:-1]).all()
        others = [fitted * (1 + random.normal(0, s, 4)) for s in (1e-3, 1e-2, 0.1, 0.5)] * 50
        assert off(fitted) <= min(map(off, filter(allowed, others)), default=np.inf) + 1e-6


def test_seconds_follow_the_points_inside_and_the_lines_beyond() -> None:
    curve = Curve.fit([(1000, 1e-3), (4000, 2e-3), (16000, 9e-3), (32000, 18e-3)])
    assert [curve.seconds(m) for m, _ in curve.points] == pytest.approx(
        [t for _, t in curve.points]
    )
    assert curve.seconds(2000) == pytest.approx(np.sqrt(2e-6))
    assert curve.seconds(64000) == pytest.approx(36e-3, rel=0.02)
    assert curve.seconds(0) == pytest.approx(1e-3 - 1000 * curve.pieces[0].per_byte)
    sizes = np.array([0.0, 500.0, 2000.0, 5e4])
    assert curve.seconds_of(sizes).tolist() == [curve.seconds(m) for m in sizes]


def test_beyond_the_points_the_line_is_as_steep_as_the_largest_sizes_say() -> None:
    sizes = [2**k for k in range(14, 23)]
    # a link lets the first 64 KB of an exchange pass at once
    shaped = Curve.fit((m, 1e-3 + 1e-7 * max(m - 2**16, 2**12)) for m in sizes)
    assert shaped.per_byte < 0.95e-7
    grown = shaped.seconds(2**26) - shaped.seconds(2**22)
    assert grown == pytest.approx(1e-7 * (2**26 - 2**22), rel=0.04)


def test_a_slowed_curve_keeps_nothing_that_was_computed_of_the_old_one() -> None:
    curve = Curve.fit([(1000, 2e-3), (4000, 5e-3), (16000, 17e-3)])
    assert curve.latency == pytest.approx(1e-3, rel=0.05)
    slowed = curve.slowed(3.0, 2.0)
    assert slowed.latency == pytest.approx(3 * curve.latency)
    assert slowed == Curve.model_validate(slowed.model_dump())


def test_a_fit_that_is_far_off_is_not_trusted_and_says_where() -> None:
    times = [2e-3 if m == 2**20 else 1e-4 + 1e-9 * m for m in SIZES]
    odd = Curve.fit(zip(SIZES, times, strict=True))
    assert not odd.trusted
    assert odd.worst_decade == "1 MB..10 MB"
    fine = ring("world", 4, 5e-5, 8e-9)
    doubtful = fine.model_copy(update={"all_gather": odd})
    assert ring_profile(networks={"world": fine}).doubts == ()
    (doubt,) = ring_profile(networks={"world": doubtful}).doubts
    assert "world all_gather" in doubt
    assert "1 MB..10 MB" in doubt
    assert ring_profile(networks={"world": doubtful}).scaled(8, 2).doubts != ()


@pytest.mark.parametrize("bad", [[], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)]])
def test_too_little_makes_no_curve(bad) -> None:
    with pytest.raises(ClusterError, match="two sizes or more"):
        Curve.fit(bad)


@pytest.mark.parametrize(
    "saved",
    [
        ring_profile(),
        ring_profile(2, 3),
        ring_profile(1, 2),
        ring_profile().scaled(1, 1),
        ring_profile().scaled(3, 2, 1e10),
        profile({"world": Network(kind="world", ranks=2, all_reduce=ring_curve(2, 1e-4, 1e-9))}),
    ],
)
def test_what_is_saved_is_loaded(tmp_path: Path, saved: NetworkProfile) -> None:
    saved.save(tmp_path / "cluster.yaml")
    assert NetworkProfile.load(tmp_path / "cluster.yaml") == saved


def without(document: dict[str, Any], *path: str | int) -> None:
    parent: Any = document
    for step in path[:-1]:
        parent = parent[step]
    del parent[path[-1]]


def put(document: dict[str, Any], value: object, *path: str | int) -> None:
    parent: Any = document
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value


ALL_REDUCE = ("networks", "world", "all_reduce")
WRONG = {
    "a field is missing": (lambda d: without(d, *ALL_REDUCE), "networks.world.all_reduce: Field"),
    "no world": (lambda d: put(d, {}, "networks"), "networks must hold world"),
    "negative time": (
        lambda d: put(d, -1.0, *ALL_REDUCE, "points", 3, 1),
        "networks.world.all_reduce.points.3.1: Input should be greater than or equal to 0, not -1",
    ),
    "negative slowdown": (lambda d: put(d, -0.1, "compute_slowdown"), "compute_slowdown: Input"),
    "text": (lambda d: put(d, "four", "world_size"), "world_size: Input should be a valid integer"),
    "not finite": (lambda d: put(d, float("nan"), "exchange_slowdown"), "exchange_slowdown"),
    "a typo": (lambda d: put(d, 1, "wordl_size"), "wordl_size: Extra inputs are not permitted"),
    "out of order": (
        lambda d: put(d, 1, *ALL_REDUCE, "points", 3, 0),
        "points must ascend in bytes, but 1 follows 2048",
    ),
    "other ranks": (lambda d: put(d, 5, "world_size"), "world_size is 5, networks.world.ranks 4"),
    "other hosts": (lambda d: put(d, 3, "hosts"), "4 ranks are not on 3 hosts of at most 1"),
}


@pytest.mark.parametrize(("spoil", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused(tmp_path: Path, spoil, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    document = ring_profile().model_dump(mode="json")
    spoil(document)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ClusterError) as caught:
        NetworkProfile.load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "slipstream doctor network" in str(caught.value)


NO_DOCUMENT = {
    "empty": (b"", "empty"),
    "no YAML": (b"a: [1", "not valid YAML, line"),
    "a list": (b"- 1", "(top level): Input should be an object"),
    "a trace": (b'{"traceEvents": []}', "is a trace; give a file of slipstream doctor network"),
    "a strategy": (b"gradients: {accumulate: 2}", "is a strategy; give a file"),
    "no text": (b"\xff\xfe\x00", "not UTF-8"),
}


@pytest.mark.parametrize(("content", "said"), NO_DOCUMENT.values(), ids=NO_DOCUMENT)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ClusterError, match=r"c\.yaml") as caught:
        NetworkProfile.load(tmp_path / "c.yaml")
    assert said in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        NetworkProfile.load(tmp_path / "none.yaml")
    with pytest.raises(ClusterError, match="cannot be written"):
        ring_profile().save(tmp_path / "no" / "folder.yaml")


def test_another_group_size_is_refused() -> None:
    ring_profile().check_world(4)
    with pytest.raises(ClusterError, match="describes 4 ranks, the run has 8"):
        ring_profile().check_world(8)


def test_groups_that_are_the_world() -> None:
    assert ring_profile(1, 4).groups("intra").kind == "world"
    assert ring_profile(4, 1).groups("inter").kind == "world"
    assert [ring_profile(2, 2).groups(kind).kind for kind in ("world", "intra", "inter")] == [
        "world",
        "intra",
        "inter",
    ]
    with pytest.raises(ClusterError, match="intra was not measured"):
        ring_profile(4, 1).groups("intra")


def same(one: Curve, other: Curve) -> bool:
    sizes = np.geomspace(2**10, 2**30, 50)
    return bool(np.allclose(one.seconds_of(sizes), other.seconds_of(sizes), rtol=1e-3))


@pytest.mark.parametrize("shape", [(2, 1), (8, 1), (8, 4), (512, 8)])
def test_other_sizes_follow_the_laws_of_a_ring(shape: tuple[int, int]) -> None:
    scaled, expected = ring_profile(4, 2).scaled(*shape), ring_profile(*shape)
    assert (scaled.world_size, scaled.hosts, scaled.ranks_per_host) == (shape[0] * shape[1], *shape)
    assert scaled.networks.keys() == expected.networks.keys()
    for kind, like in expected.networks.items():
        assert scaled.networks[kind].ranks == like.ranks
        for name, curve in like.curves.items():
            assert same(scaled.networks[kind].curves[name], curve), (kind, name)
    assert scaled.extrapolated.startswith(f"from 4 x 2 to {shape[0]} x {shape[1]} ranks")


def test_one_host_is_as_fast_as_the_inside_of_one() -> None:
    assert same(
        ring_profile(4, 2).scaled(1, 8).groups("world").all_reduce,
        ring_profile(1, 8).networks["world"].all_reduce,
    )


def test_a_rate_replaces_the_links_but_never_beats_the_hosts() -> None:
    def per_byte(scaled: NetworkProfile, kind) -> float:
        return scaled.groups(kind).all_reduce.per_byte

    slow = ring_profile(4, 2).scaled(8, 4, rate=2e9)
    assert per_byte(slow, "world") == pytest.approx(2 * 31 / 32 * 4e-9 * FRAMES, rel=1e-3)
    assert per_byte(slow, "inter") == pytest.approx(2 * 7 / 8 * 4e-9 * 4 * FRAMES, rel=1e-3)
    assert per_byte(slow, "intra") == pytest.approx(2 * 3 / 4 * 1e-9, rel=1e-3)
    assert "links of 2 Gbit/s" in slow.extrapolated
    fast = ring_profile(4, 2).scaled(8, 4, rate=1e12)
    assert per_byte(fast, "world") == pytest.approx(2 * 31 / 32 * 1e-9, rel=1e-3)


def test_what_was_not_measured_is_said() -> None:
    assert "derived from world" in ring_profile(4, 1).scaled(4, 2).extrapolated
    assert "as fast as inside" in ring_profile(1, 2).scaled(2, 2).extrapolated
    assert "as fast as inside" not in ring_profile(1, 2).scaled(2, 2, 1e9).extrapolated
    assert ring_profile(4, 2).scaled(4, 2) == ring_profile(4, 2)


def test_among_one_rank_nothing_costs_anything() -> None:
    alone = ring_profile().scaled(1, 1)
    assert alone.groups("world").all_reduce.seconds(2**20) == pytest.approx(0)
    assert alone.groups("world").all_reduce.pieces == (
        Piece(start_bytes=0, startup=0.0, per_byte=0.0),
    )
    with pytest.raises(ClusterError, match="one rank alone"):
        alone.scaled(2, 1)


@pytest.mark.parametrize("shape", [(0, 1), (1, -1), (4, 1, -1e9)])
def test_no_such_size(shape) -> None:
    with pytest.raises(ClusterError, match="must be above 0"):
        ring_profile().scaled(*shape)


def test_a_file_of_an_earlier_version_is_read_without_its_ring(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    ring_profile().save(path)
    document = yaml.safe_load(path.read_text())
    world = document["networks"]["world"]
    world["ring_all_reduce"] = world["all_reduce"]
    path.write_text(yaml.safe_dump(document))
    assert NetworkProfile.load(path) == ring_profile()
