"""The tutorial: its script trains, its commands read what that writes, and the page shows what was
recorded."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.pages import results
from benchmarks.tutorial import COMMANDS, PAGE, files
from slipstream.strategy import Strategy
from tests.cli.running import run
from tests.harness.scripts import Script, torchrun
from tests.planner.networks import ring_profile


def test_the_script_trains_and_the_commands_read_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = files(PAGE.read_text())
    small = {"1024": "64", "range(6)": "range(1)"}
    for name, text in shown.items():
        for large, less in small.items():
            text = text.replace(large, less)
        (tmp_path / name).write_text(text)
    log = tmp_path / "log"
    ranks = [
        Script(
            tmp_path / "train.py",
            env=env | {"SLIPSTREAM_STRATEGY": str(tmp_path / "trace.yaml")},
            log=log,
            folder=tmp_path,
        )
        for env in torchrun(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0], log.read_text()
    assert "epoch 0: loss" in log.read_text()
    ring_profile(hosts=1, ranks_per_host=2).save(tmp_path / "cluster.yaml")
    monkeypatch.chdir(tmp_path)
    for step in ("summary", "advise", "plan"):
        assert run(*shlex.split(COMMANDS[step])[1:])
    Strategy.load(tmp_path / "best.yaml")


def test_what_the_page_shows_is_what_was_recorded() -> None:
    steps = results()["tutorial"]["steps"]
    assert {step: found["command"] for step, found in steps.items()} == COMMANDS
    assert json.dumps(steps).count(str(Path.home())) == 0
    assert all(found["said"] for found in steps.values())
