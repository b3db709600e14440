"""``slipstream plan``: the tables arrive, the best strategy is written, mistakes end in one box."""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np
import pytest

from slipstream.cli import main
from slipstream.errors import ClusterError, LaunchError, SlipstreamError
from slipstream.gradients.layout import plan_segments
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.iteration.traced import gradients_of
from slipstream.planner.progress.calibration import LossCalibration, LossRun
from slipstream.planner.search.label import label
from slipstream.strategy import Strategy
from slipstream.trace import Trace, read, write
from tests.cli.running import run
from tests.harness.traces import by_hand
from tests.planner.networks import ethernet_profile as cluster
from tests.planner.workloads import workload

ONE_HOST = {"hosts": 1, "ranks_per_host": 4}


_run = partial(run, "plan")


def test_the_tables_rank_strategies_and_show_other_clusters(files, tmp_path) -> None:
    best = tmp_path / "best.yaml"
    shown = _run(*files, "-o", str(best))
    for text in ("4 ranks on 4 hosts", "by_bytes 4 (first 1, last 1) *", "4096", "100 Gbit/s"):
        assert text in shown
    assert "Extrapolated" not in shown
    strategy = Strategy.load(best)
    assert shown.index(f"\u2192 {label(strategy)}") < shown.index("by_bytes 4 (first 1, last 1) *")


def test_the_strategy_of_the_trace_stays_where_nothing_is_surely_faster(files, tmp_path) -> None:
    written = tmp_path / "best.yaml"
    unsure = cluster(latency=0.06).model_copy(update={"noise": 3.0})
    unsure.save(tmp_path / "cluster.yaml")
    shown = " ".join(_run(*files, "-o", str(written)).split())
    assert "Not recommended: by_" in shown
    assert "the strategy of the trace stays. Only a measurement tells: slipstream tune" in shown
    assert "\u2192 by_bytes 4 (first 1, last 1) *" in shown
    assert "The strategy of the trace is in" in shown
    assert Strategy.load(written) == Strategy()
    numbers = json.loads(_run(*files, "--json"))
    assert numbers["recommended"] == label(Strategy())
    first = numbers["strategies"][0]
    assert first["interval"][0] < first["seconds"] < first["interval"][1]
    assert first["ratio"] < 1 < first["ratio_interval"][1]


def test_the_predicted_trace_is_one_that_other_commands_read(files, tmp_path) -> None:
    _run(*files, "--predicted", str(tmp_path / "future.json"), "-o", str(tmp_path / "best.yaml"))
    future = read(tmp_path / "future.json")
    assert future.meta["predicted"] is True
    split = Strategy.load(tmp_path / "best.yaml").gradients.split
    assert len(future.meta["segments"]) == len(plan_segments(gradients_of(future), split))
    assert {event.rank for event in future.events} == {0, 1, 2, 3}


def test_another_cluster_is_extrapolated_and_says_so(files) -> None:
    shown = _run(*files, "--nodes", "64", "--ranks-per-node", "1", "--rate", "25gbit")
    assert "64 ranks on 64 hosts" in shown
    assert "Extrapolated" in shown


def test_a_cluster_of_another_size_is_used_only_for_an_extrapolation(files, tmp_path) -> None:
    cluster(2).save(tmp_path / "cluster.yaml")
    with pytest.raises(ClusterError, match="describes 2 ranks, the run has 4"):
        _run(*files)
    shown = _run(*files, "--nodes", "8")
    assert "8 ranks on 8 hosts" in shown
    assert "Extrapolated" in shown


def test_hosts_of_different_size_and_a_single_host_say_nothing_of_others(files, tmp_path) -> None:
    uneven = cluster(4).model_copy(update={"hosts": 3, "ranks_per_host": 2})
    for there, by_nodes in ((uneven, False), (cluster(4).model_copy(update=ONE_HOST), True)):
        there.save(tmp_path / "cluster.yaml")
        shown = _run(*files)
        assert "4 ranks" in shown
        assert "other links" not in shown
        assert ("fewer nodes" in shown) == by_nodes
        with pytest.raises(ClusterError, match=r"different size|ranks are on one host"):
            _run(*files, "--rate", "25gbit")


def test_json_is_for_machines(files, tmp_path) -> None:
    numbers = json.loads(_run(*files, "--json", "--allow-lossy", "-o", str(tmp_path / "b.json")))
    rows = numbers["strategies"]
    assert Strategy.load(rows[0]["strategy"]) == Strategy.load(tmp_path / "b.json")
    assert {row["exactness"] for row in rows} >= {"reordered", "reordered, batch x4"}
    assert [point["nodes"] for point in numbers["nodes"]] == [2**power for power in range(13)]
    assert numbers["rates"][0]["rate"] == 1e8
    assert all(0 < point["efficiency"] <= 1.001 for point in numbers["nodes"])
    words = " ".join(_run(*files, "--allow-lossy").split())
    assert f"Meeting rarely: {numbers['meetings']}." in words
    assert "Meeting rarely" not in _run(*files)


def test_what_is_not_the_exchange_is_predicted_too(files, tmp_path) -> None:
    assert "with data" not in _run(*files)  # the trace says of no use
    work = workload(late=0.04, data_wait=np.full(4, 0.05))
    recorded = simulate(work, CommPlan.of(Strategy(), work.gradients), cluster(4), steps=2)
    uses = {"prefetchable": True, "balanceable": True, "strategy": Strategy().document(full=True)}
    uses["useful_compute"] = ["compile", "fuse_optimizer"]
    write(Trace(recorded.events, recorded.meta | uses), tmp_path / "trace.json")
    numbers = json.loads(_run(*files, "--json"))
    best = numbers["strategies"][0]["seconds"]
    seconds = {one["setting"]: best - one["seconds"] for one in numbers["beside"]}
    assert seconds.keys() == {"data.prefetch", "data.balance", "compute.fuse_optimizer"}
    # Of 0.05 s of wait, of ranks that are 0 to 0.12 s late, of 0.03 s of update.
    assert seconds["data.prefetch"] == pytest.approx(0.05, rel=0.1)
    assert seconds["compute.fuse_optimizer"] == pytest.approx(0.03, rel=0.1)
    assert seconds["data.balance"] == pytest.approx(0.06, rel=0.1)
    shown = " ".join(_run(*files).split())
    assert "%) with data.balance" in shown
    assert "% at best) with compute.fuse_optimizer" in shown
    assert "Nothing predicts compute.compile: slipstream tune tries" in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--trace", "no-such.json"], "cannot be read"),
        (["--cluster", "no-such.yaml"], "slipstream doctor network"),
        (["--rate", "fast"], "is not a link rate"),
        (["-o", "best.txt"], "must end in .yaml"),
        (["-o", "no/such/folder.yaml"], "cannot be written, as there is no folder no/such"),
        (
            ["--predicted", "no/such/trace.json"],
            "--predicted no/such/trace.json: cannot be written",
        ),
        (["--predicted", "best.gz"], "the name must end in .json or .json.gz"),
        (["--trace", "foreign.json"], "gradients"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_in_a_box_and_code_2(
    monkeypatch, capsys, files, tmp_path, options, reason
) -> None:
    monkeypatch.chdir(tmp_path)
    write(by_hand(ranks=4), "foreign.json")  # of a version that did not list the gradients
    monkeypatch.setattr(sys, "argv", ["slipstream", "plan", *files, *options])
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == 2
    box = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert reason in box
    assert "Traceback" not in box


@pytest.fixture
def losses(tmp_path):
    """Losses of short runs: int8 loses nothing, and is twice as fast for it."""
    dense = [1 + 4 * update**-0.5 for update in range(1, 121)]
    runs = [
        LossRun(strategy=settings, seconds=1.0, error=0.01, losses=dense)
        for settings in ({}, {"gradients": {"codec": "int8"}})
    ]
    LossCalibration(runs=runs, noise=1.0).save(tmp_path / "losses.json")
    return str(tmp_path / "losses.json")


def test_a_loss_or_a_time_ranks_by_the_whole_training(files, losses, tmp_path) -> None:
    best = tmp_path / "best.yaml"
    files = [*files, "--allow-lossy"]
    shown = _run(*files, "--to-loss", "1.2", "--losses", losses, "-o", str(best))
    for text in (
        "time to a loss of 1.2",
        "accumulate 2 \u2021",
        "by_bytes 4 (first 1, last 1) *",
        "int8 is left out",
    ):
        assert text in shown
    chosen = Strategy.load(best)
    document = json.loads(_run(*files, "--for", "10m", "--losses", losses, "--json"))
    names = [row["name"] for row in document["predictions"]]
    assert label(Strategy()) in names
    low, middle, high = document["predictions"][0]["loss"]
    assert 0.5 < low < middle < high < 2
    assert document["unknown"] > 0
    far = json.loads(_run(*files, "--for", "100h", "--losses", losses, "--json"))
    assert any("nobody has held an interval" in text for text in far["warnings"])
    again = json.loads(_run(*files, "--to-loss", "1.2", "--losses", losses, "--json"))
    assert Strategy.load(again["strategy"]) == chosen
    assert "half" not in str([row["strategy"] for row in again["predictions"]])


def test_a_goal_that_cannot_be_answered_is_refused(files, losses) -> None:
    with pytest.raises(SlipstreamError, match=r"--to-loss compares .*: add --allow-lossy"):
        _run(*files, "--to-loss", "1.2", "--losses", losses)
    files = [*files, "--allow-lossy"]
    for words, said in {
        ("--to-loss", "1.2"): "slipstream tune --allow-lossy --to-loss LOSS -- train.py",
        ("--for", "soon", "--losses", losses): "write a number and s, m or h",
        ("--losses", losses): "has no effect without --to-loss or --for",
        ("--to-loss", "1", "--for", "1h", "--losses", losses): "two questions",
        ("--to-loss", "1.2", "--losses", losses, "--nodes", "8"): "--nodes has no effect",
        ("--to-loss", "4", "--losses", losses): "in its 120 updates",
    }.items():
        with pytest.raises(SlipstreamError, match=said):
            _run(*files, *words)


@pytest.mark.parametrize(
    ("option", "name", "source"),
    [
        ("-o", "trace.json", "--trace"),
        ("-o", "cluster.yaml", "--cluster"),
        ("--predicted", "trace.json", "--trace"),
        ("--predicted", "../{folder}/trace.json", "--trace"),
    ],
)
def test_a_result_does_not_take_the_place_of_what_it_is_made_of(
    files, tmp_path, option, name, source
) -> None:
    result = tmp_path / name.format(folder=tmp_path.name)
    before = result.read_bytes()
    with pytest.raises(LaunchError, match=f"would overwrite the file of {source}"):
        _run(*files, option, str(result))
    assert result.read_bytes() == before


def test_two_results_need_two_files(files, tmp_path) -> None:
    both = str(tmp_path / "both.json")
    with pytest.raises(LaunchError, match=r"--predicted .* the file of --output; choose another"):
        _run(*files, "-o", both, "--predicted", both)
