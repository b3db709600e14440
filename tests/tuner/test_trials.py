"""Trials of a script on real processes: what they measure, and that they leave nothing behind."""

from __future__ import annotations

import shlex
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel

from slipstream.strategy import DgcConfig, Strategy, late_by
from slipstream.trace import Trace, chrome, read
from slipstream.tuner import trials
from slipstream.tuner.trials import Failure, Measurement, Trials, iterations, measure
from tests.harness.traces import by_hand
from tests.testbed.traces import wait_for_marked

TRACE = by_hand(ranks=2, steps=4)

SCRIPTS = {
    "writes a trace and goes on": "finish(); time.sleep(100)",
    "writes a trace and ends": "finish()",
    "writes a trace in two parts": "finish(half=True); time.sleep(0.3); finish(); time.sleep(100)",
    "fails": "print('so far'); raise RuntimeError('boom')",
    "is killed": "os.kill(os.getpid(), 9)",
    "ends without a trace": "pass",
    "ends with half a trace": "finish(half=True)",
    "hangs": "time.sleep(100)",
    "hangs and does not want to end": "ignore(signal.SIGTERM); time.sleep(100)",
}
OUTCOMES = {
    "writes a trace and goes on": None,
    "writes a trace and ends": None,
    "writes a trace in two parts": None,
    "fails": ("failed", "exit code 1: RuntimeError: boom"),
    "is killed": ("failed", "killed by SIGKILL: it wrote nothing"),
    "ends without a trace": ("no trace", "it ended without a trace"),
    "ends with half a trace": ("failed", "not valid JSON"),
    "hangs": ("hanging", "no trace after 1 s: killed"),
    "hangs and does not want to end": ("hanging", "no trace after 1 s: killed"),
}
PRELUDE = """
import os, signal, subprocess, sys, time
folder, template, marker = sys.argv[1:]
text = open(template).read()
os.makedirs(folder + "/checkpoints/runs/a/update-00000001")
def ignore(number):
    signal.signal(number, signal.SIG_IGN)
def finish(half=False):
    with open(folder + "/trace.json", "w") as file:
        file.write(text[:len(text) // 2] if half else text)
# A child in a session of its own, as launchers have them.
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)", marker],
                 start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], tuple[list[str], str]]:
    """From the last lines of a script to a command that runs it, and the mark of its child."""
    chrome.write(TRACE, tmp_path / "template.json")

    def make(code: str) -> tuple[list[str], str]:
        (tmp_path / "script.py").write_text(PRELUDE + code)
        marker = f"child-{uuid.uuid4()}"
        words = [sys.executable, "-S", "script.py", ".", "template.json", marker]
        return ["sh", "-c", f"cd {shlex.quote(str(tmp_path))}; exec {shlex.join(words)}"], marker

    return make


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_ends_with_its_trace_and_leaves_no_process(
    tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trials, "GRACE_SECONDS", 0.5)
    argv, marker = command(SCRIPTS[name])
    outcome = measure(argv, tmp_path, limit=1.0 if "hangs" in name else 20.0)
    if OUTCOMES[name] is None:
        assert isinstance(outcome, Measurement)
        assert outcome.trace == read(tmp_path / "template.json")
        assert outcome.seconds == pytest.approx(0.1)
        assert outcome.spread == pytest.approx(0)
    else:
        status, reason = OUTCOMES[name]
        assert isinstance(outcome, Failure)
        assert outcome.status == status
        assert reason in outcome.reason
    assert wait_for_marked(marker, 0) == []  # the last one may be ending
    assert not (tmp_path / "checkpoints").exists()


def test_trials_number_their_folders_and_trace_the_strategy(tmp_path: Path) -> None:
    seen: list[str] = []

    def command(folder: Path) -> list[str]:
        seen.append((folder / "strategy.yaml").read_text())
        return ["false"]

    config = Strategy.load({"gradients": {"overlap": False}, "trace": {"steps": 99}})
    runs = Trials(command, tmp_path / "logs", steps=4, skip=1)
    for _ in range(2):
        assert isinstance(runs.run(config, 5.0), Failure)
    strategies = [Strategy.from_yaml(text) for text in seen]
    assert [s.trace.steps for s in strategies] == [4, 4]
    assert [s.trace.skip for s in strategies] == [1, 1]
    assert [s.trace.folder for s in strategies] == [
        str(tmp_path / "logs" / name) for name in ("01", "02")
    ]
    assert not any(s.gradients.overlap for s in strategies)


def test_an_iteration_is_as_long_as_it_is_on_the_mean_of_ranks() -> None:
    events = [
        event.__class__(event.name, event.rank, event.step, 0.0, 1.0 + event.rank * event.step)
        for event in by_hand(ranks=3, steps=2).events
        if event.name == "iteration"
    ]
    assert iterations(Trace(tuple(events))) == [3.0, 4.0]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["onebit", "powersgd", "dgc", "int8"])
def test_a_trial_runs_the_codec_as_it_is_in_the_end(kind: str, tmp_path: Path) -> None:
    strategy = Strategy.load({"gradients": {"codec": kind}})
    trial = Trials(lambda folder: [sys.executable, "-c", ""], tmp_path).run(strategy, 20.0)
    assert isinstance(trial, Failure)
    codec = Strategy.load(str(tmp_path / "01" / trials.STRATEGY)).gradients.codec
    assert codec is not None
    assert codec.kind == kind
    assert late_by(codec) == 0
    assert isinstance(codec, DgcConfig) == (kind == "dgc")
    if isinstance(codec, DgcConfig):
        assert codec.density == DgcConfig().density


BROKEN = (
    "sample 17 of shard-00001.tar has 4 channels where the others have 3: convert it, or leave it "
    "out, then start the training again"
)


@pytest.mark.parametrize(
    ("box", "says"),
    [
        (
            Panel(f"rank 1 exited\nTraceback:\nValueError: {BROKEN}\n[W] a warning"),
            f"ValueError: {BROKEN}",
        ),
        (Panel(BROKEN, title="LaunchError", title_align="left"), f"LaunchError: {BROKEN}"),
    ],
    ids=["of a rank", "of a mistake"],
)
def test_the_error_of_a_run_is_told_whole_though_a_box_breaks_it(
    tmp_path: Path, box: Panel, says: str
) -> None:
    with (tmp_path / trials.OUTPUT).open("w") as file:
        Console(file=file, width=80).print("step 1", box, "logs: here", sep="\n")
    assert trials.last_words(tmp_path) == f"{says} (see {tmp_path / trials.OUTPUT})"
