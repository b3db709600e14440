"""``slipstream trace``: the numbers arrive, mistakes end in one box."""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import partial

import pytest
from typer.testing import CliRunner

from slipstream.cli import main
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import Network, NetworkProfile
from slipstream.strategy import Strategy
from slipstream.trace import write
from tests.cli.running import run
from tests.harness.traces import by_hand
from tests.harness.training import Training


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.json.gz"
    write(by_hand(ranks=3), path)
    return str(path)


_run = partial(run, "trace")


def test_summary_shows_the_tables(file):
    shown = _run("summary", file)
    for text in ("ResNet-50", "3 ranks", "exposed exchange", "27.00", "Gbit/s", "rank 0, step 2"):
        assert text in shown
    assert "Rank by rank" not in shown


def test_options_choose_ranks(file):
    assert "Rank by rank" in _run("summary", file, "--per-rank")
    assert "rank 2, step" in _run("summary", file, "--rank", "2")


def test_json_is_for_machines(file):
    numbers = json.loads(_run("summary", file, "--json"))
    assert numbers["iterations"] == 3
    assert set(numbers["ranks"]) == {"0", "1", "2"}
    assert numbers["over_ranks"]["forward"]["slowest"] == 2
    assert numbers["exchanges"][1]["hidden"] == pytest.approx(0.010)
    alone = json.loads(_run("summary", file, "--json", "--rank", "1"))
    assert set(alone["ranks"]) == {"1"}


def test_help_shows_an_example():
    assert "slipstream trace summary trace.json" in _run("summary", "--help")


def test_a_baseline_adds_the_efficiency(tmp_path):
    paths = {ranks: str(tmp_path / f"{ranks}.json") for ranks in (1, 4)}
    for ranks, path in paths.items():
        write(Training(ranks=ranks).trace, path)
    assert "scaling efficiency 0.762" in _run("summary", paths[4], "--baseline", paths[1])
    numbers = json.loads(_run("summary", paths[4], "--baseline", paths[1], "--json"))
    assert numbers["scaling_efficiency"] == pytest.approx(160 / 210)


def test_advise_shows_findings_with_their_patches(tmp_path):
    write(Training(cuts=(2, 9, 10), startup=6, per_mb=7).trace, tmp_path / "trace.json")
    shown = _run("advise", str(tmp_path / "trace.json"))
    assert "  gradients.split  up to" in shown
    patch = re.split(r"strategy: *\n", shown)[1]
    lines = itertools.takewhile(str.strip, patch.splitlines())
    asked = Strategy.from_yaml("\n".join(line.removeprefix("  ") for line in lines))
    assert asked.gradients.split.kind == "per_gradient"
    found = json.loads(_run("advise", str(tmp_path / "trace.json"), "--json"))
    assert found[0]["where"] == "gradients.split"
    assert found[0]["patch"]["gradients"]["split"] == {"kind": "per_gradient"}


def _cluster(path, world_size: int, startup: float, noise: float = 0.0) -> str:
    points = [(2**k, (startup + 2e-9 * 2**k) * (1 + noise * (k % 2))) for k in range(10, 27)]
    curve = Curve.fit(points)
    network = Network(
        kind="world", ranks=world_size, all_reduce=curve, reduce_scatter=curve, all_gather=curve
    )
    NetworkProfile(
        world_size=world_size,
        hosts=world_size,
        ranks_per_host=1,
        networks={"world": network},
        compute_slowdown=0.0,
        exchange_slowdown=0.0,
        latency_slowdown=0.0,
        queue_share=0.0,
        queue_seconds=0.0,
        backend="gloo",
        date="2026-01-31",
        versions={},
    ).save(path)
    return str(path)


def test_advise_takes_the_cost_from_a_cluster_file(tmp_path):
    training = Training(cuts=(10,))  # one size: the trace itself does not tell the startup of 40 ms
    write(training.trace, tmp_path / "trace.json")
    trace, cluster = str(tmp_path / "trace.json"), _cluster(tmp_path / "c.yaml", 2, 0.040)
    alone, told = (
        next(f for f in json.loads(_run("advise", trace, "--json", *more)) if "split" in f["where"])
        for more in ([], ["--cluster", cluster])
    )
    assert alone["gain"] > told["gain"] > 0


def test_advise_warns_of_a_curve_that_does_not_fit(tmp_path):
    write(Training().trace, tmp_path / "trace.json")
    cluster = _cluster(tmp_path / "c.yaml", 2, 0.040, noise=3.0)
    arguments = ["trace", "advise", str(tmp_path / "trace.json"), "--cluster", cluster]
    result = CliRunner().invoke(main.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "world all_reduce: the fit is" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "spoil", "reason"),
    [
        (["summary", "no-such-file.json"], None, "TraceError no-such-file.json cannot be read"),
        (["summary", "two.json", "--rank", "9"], None, "TraceError rank 9 is not in the trace"),
        (["summary", "two.json", "--baseline", "two.json"], None, "the baseline has 2 ranks"),
        (
            ["advise", "two.json"],
            lambda text: text[:-100],
            "TraceError two.json cannot be read: not valid JSON, line 1",
        ),
        (["advise", "two.json"], lambda text: "{}", "not a trace of slipstream"),
        (["advise", "two.json", "--cluster", "four.yaml"], None, "ClusterError"),
        (["advise", "two.json", "--cluster", "two.json"], None, "ClusterError"),
    ],
)
def test_mistakes_end_in_a_box_and_code_2(monkeypatch, capsys, tmp_path, command, spoil, reason):
    monkeypatch.chdir(tmp_path)
    write(Training().trace, "two.json")
    _cluster("four.yaml", 4, 0.001)
    if spoil:
        path = tmp_path / "two.json"
        path.write_text(spoil(path.read_text()))
    monkeypatch.setattr(sys, "argv", ["slipstream", "trace", *command])
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == 2
    box = " ".join(re.sub("[^ -~]", " ", capsys.readouterr().err).split())
    assert reason in box
