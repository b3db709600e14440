"""``slipstream scale``: real runs of a script that never ends, and what they come to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from slipstream.cli import main
from slipstream.cli.scale import curve, parse_ranks, plot
from slipstream.errors import LaunchError
from slipstream.trace.chrome import read
from slipstream.trace.event import ITERATION
from slipstream.tuner.trials import Failure, Trials
from tests.harness.training import Training

TRAIN = """
import itertools, os, pathlib, sys
import torch, slipstream
pathlib.Path(f"pid{os.environ['WORLD_SIZE']}-{os.environ['RANK']}").write_text(str(os.getpid()))
assert sys.argv[1:] == ["--batch", "6"]
model = torch.nn.Linear(8, 8)
session = slipstream.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in itertools.count():
    session.backward(session.model(torch.ones(6, 8)).square().mean())
    session.step()
"""
FAIL = "raise RuntimeError('no data here')"
NO_STEP = "print('done')"


@pytest.fixture
def scale(monkeypatch, capfd, tmp_path) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Scale a script in this process: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(script: str, *options: str) -> tuple[int, str, str]:
        Path("train.py").write_text(script)
        words = ["--folder", "out", *options, "--", "train.py", "--batch", "6"]
        monkeypatch.setattr(sys, "argv", ["slipstream", "scale", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, " ".join(re.sub("[^ -~]", " ", err).split())

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_each_number_of_ranks_is_measured_and_nothing_is_left_running(
    tmp_path: Path, forks: str
) -> None:
    (tmp_path / "strategy.yaml").write_text("gradients: {split: single}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    options = ["--ranks", "2,1", "--steps", "4", "--strategy", "strategy.yaml"]
    names = ("SLIPSTREAM_STRATEGY", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    words = ["--folder", "out", *options, "--", "train.py", "--batch", "6"]
    done = subprocess.run(
        [forks, "-m", "slipstream", "scale", *words],
        cwd=tmp_path,
        env=environ | {"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out" / "scale.json").read_text())
    assert document["command"] == ["train.py", "--batch", "6"]
    assert document["strategy"] == {"gradients": {"split": "single"}}
    assert document["unit"] == "samples/s"
    one, two = document["points"]
    assert (one["ranks"], one["speed_up"], one["efficiency"]) == (1, 1.0, 1.0)
    assert two["ranks"] == 2
    assert two["efficiency"] == pytest.approx(two["rate"] / (2 * one["rate"]))
    (trace,) = tmp_path.glob("out/ranks-1/**/trace.json")
    iterations = [event.duration for event in read(trace).events if event.name == ITERATION]
    assert one["rate"] == pytest.approx(median(6 / seconds for seconds in iterations))
    for text in ("Scaling on this machine", "samples/s", "speed-up (dots: linear)"):
        assert text in done.stdout
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 3
    until = time.monotonic() + 30  # a fork ends a moment after what stands for it: see forks.py
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert len(list(tmp_path.glob("out/ranks-*/**/trace.json"))) == 2


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        (FAIL, (), "--ranks 1: .*no data here.* Fix the script"),
        (
            NO_STEP,
            (),
            "--ranks 1: .*ended without a trace.* It must take more steps",
        ),
        (TRAIN, ("--limit", "0.1"), "--ranks 1: .*Raise --limit"),
        (TRAIN, ("--strategy", "no-such-preset"), "no-such-preset"),
    ],
    ids=["fails", "never steps", "too slow", "no strategy"],
)
def test_a_run_without_a_trace_is_one_clear_error(scale, forks, script, options, reason):
    code, out, err = scale(script, "--ranks", "1", "--steps", "2", *options)
    assert (code, out) == (2, "")
    assert re.search(reason, err), err
    assert "Traceback" not in err


def test_a_missing_script_is_found_before_anything_runs(scale) -> None:
    code, _, err = scale("", "nowhere.py")
    assert code == 2
    assert "'nowhere.py' does not exist" in err
    assert not Path("out").exists()


@pytest.mark.parametrize("limit", ["-1", "0", "nan"])
def test_a_limit_that_is_no_time_is_found_before_anything_runs(scale, limit) -> None:
    code, _, err = scale(TRAIN, "--limit", limit)
    assert code == 2
    assert "--limit" in err
    assert not Path("out").exists()


def test_ranks_that_meet_rarely_are_not_measured_by_single_iterations(scale) -> None:
    Path("local.yaml").write_text("local: {steps: 16}")
    code, _, err = scale(TRAIN, "--strategy", "local.yaml")
    assert code == 2
    assert "--strategy with local" in err


def test_a_folder_that_cannot_be_made_is_named_with_the_option(scale) -> None:
    code, _, err = scale(TRAIN, "--folder", "train.py")
    assert code == 2
    assert "train.py cannot be made: File exists; choose another place by --folder" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind_it_and_ignored_ones_stay_ignored(scale, monkeypatch, number) -> None:
    ended = []

    def run(*_: object) -> Failure:
        try:
            signal.raise_signal(signal.SIGHUP)  # ignored, or the one that is tried
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(number)
        raise AssertionError

    monkeypatch.setattr(Trials, "run", run)
    ignored = number is signal.SIGTERM
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.default_int_handler)
    code, _, _ = scale(TRAIN)
    assert (code, ended) == (128 + number, [number])


@pytest.mark.parametrize("text", ["", "0", "1,,2", "two", "-1", "1.5"])
def test_ranks_are_numbers_above_0(text: str) -> None:
    with pytest.raises(LaunchError, match=r"write numbers above 0"):
        parse_ranks(text)


def test_under_a_launcher_it_refuses(scale, monkeypatch) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    code, out, err = scale(TRAIN)
    assert (code, out) == (2, "")
    assert "started this as rank 1" in err
    assert "slipstream scale --ranks 1,2,4 -- train.py" in err


def test_the_curve_counts_batches_where_samples_are_not_told() -> None:
    points, unit = curve({ranks: Training(ranks=ranks, samples=0).trace for ranks in (4, 2)})
    assert unit == "batches"
    assert [(point.ranks, point.speed_up, point.efficiency) for point in points] == [
        (2, 1.0, 1.0),
        (4, pytest.approx(2.0), pytest.approx(1.0)),
    ]
    assert points[0].rate == pytest.approx(2 / 0.210)
    assert points[0].exposed == pytest.approx(0.050)


def test_bars_stop_at_the_border_and_dots_reach_the_linear_speed_up() -> None:
    points, _ = curve({ranks: Training(ranks=ranks).trace for ranks in (1, 2, 4)})
    bars = plot(points).plain.splitlines()[1:]
    assert [bar.count("#") for bar in bars] == [10, 15, 30]  # 160 ms alone, else 210
    assert [bar.count("#") + bar.count(".") - 1 for bar in bars] == [10, 20, 40]
    assert {len(bar) for bar in bars} == {len(bars[0])}
