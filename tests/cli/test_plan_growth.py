"""``slipstream plan --ranks``: tables and chart, JSON, and mistakes with their remedy."""

from __future__ import annotations

import json
from functools import partial

import pytest
import yaml

from slipstream.cli.plan.growth import chart
from slipstream.errors import SlipstreamError
from slipstream.planner.scale_out.growth import Growth, GrowthPoint
from slipstream.strategy import Strategy
from tests.cli.running import run
from tests.planner.scale_out.shapes import document

_run = partial(run, "plan")


@pytest.fixture
def shaped(tmp_path) -> list[str]:
    file = tmp_path / "shape.yaml"
    file.write_text(yaml.safe_dump(document(machine={"host_gbytes": 1.0})))
    return ["--shape", str(file)]


def test_the_curve_of_a_trace_says_who_takes_over_and_what_it_costs(files) -> None:
    shown = _run(*files, "--ranks", "64..4096", "--allow-lossy")
    words = " ".join(shown.split())
    for text in ("64", "128", "4096", "rank hours per 1,000 updates", "local, 16 steps (lossy)"):
        assert text in words
    assert "From 64 ranks on: local, " in words
    assert "Each rank keeps its batch" in words
    assert "The network: from " in words
    numbers = json.loads(_run(*files, "--ranks", "64,256", "--json"))
    assert {point["ranks"] for point in numbers["points"]} == {64, 256}
    assert all(Strategy.load(point["strategy"]) for point in numbers["points"])
    assert all(point["exactness"] == "reordered" for point in numbers["points"])


def test_a_shape_needs_no_trace(shaped) -> None:
    shown = " ".join(_run(*shaped, "--ranks", "64..500").split())
    assert "technique 64 128 256" in shown
    assert "512" not in shown
    numbers = json.loads(_run(*shaped, "--ranks", "512", "--json"))
    assert [one["ranks"] for one in numbers["chosen"]] == [512]
    assert {point["technique"] for point in numbers["points"]} >= {"hierarchical", "sharded"}


def test_beside_a_trace_a_file_describes_the_fabric_alone(files, tmp_path) -> None:
    file = tmp_path / "fabric.yaml"
    file.write_text("fabric: {jitter: 0.2}")
    where = ["--ranks", "4", "--json"]
    late, usual = (
        json.loads(_run(*files, *where, *more))["points"][0]["seconds"]
        for more in (["--shape", str(file)], [])
    )
    assert late > 1.05 * usual
    file.write_text(yaml.safe_dump(document()))
    with pytest.raises(SlipstreamError, match="model: no such setting"):
        _run(*files, *where, "--shape", str(file))


def test_a_letter_stands_for_a_technique_at_its_share_of_a_linear_speed_up() -> None:
    def point(ranks: int, technique: str, speed_up: float) -> GrowthPoint:
        return GrowthPoint(ranks, technique, Strategy(), 1 / speed_up, speed_up, 1.0, "reordered")

    points = (point(8, "slow", 1.0), point(8, "fast", 1.0), point(16, "slow", 1.0))
    lines = list(chart(Growth("slow", (*points, point(16, "fast", 2.0)))))
    assert lines[0].split() == ["100%", "|", "a", "b"]
    assert lines[6].split() == ["50%", "|", "a"]
    assert lines[-1].split() == ["ranks", "8", "16"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "64..32"], r"64\.\.32: the first must be the smaller one; allowed: 64"),
        (["--ranks", "0"], "--ranks 0: numbers must be from 1 to 65536"),
        (["--ranks", "many"], "--ranks many: not whole numbers"),
        (["--ranks", "64..128..256"], "not whole numbers"),
        (["--ranks", "64", "--nodes", "8"], "--nodes has no effect with --ranks"),
        (["--ranks", "64", "-o", "best.yaml"], "--output has no effect with --ranks"),
        (["--ranks", "63", "--ranks-per-node", "8"], "63 ranks are not a multiple of 8"),
    ],
)
def test_mistakes_say_what_is_allowed(files, options, words) -> None:
    with pytest.raises(SlipstreamError, match=words):
        _run(*files, *options)


def test_files_that_are_missing_are_asked_for(shaped, files) -> None:
    with pytest.raises(SlipstreamError, match="--shape needs --ranks"):
        _run(*shaped)
    with pytest.raises(SlipstreamError, match="--ranks needs --trace and --cluster, or --shape"):
        _run("--ranks", "64")
    with pytest.raises(SlipstreamError, match="--trace and --cluster go together"):
        _run("--ranks", "64", *files[:2])
    with pytest.raises(SlipstreamError, match=r"set machine.ranks_per_host"):
        _run(*shaped, "--ranks", "64", "--rate", "1gbit")
