"""The command ``slipstream strategy``."""

from __future__ import annotations

import json
import os
from functools import partial
from threading import Event, Thread

import pytest

from slipstream.cli.main import main
from slipstream.errors import StrategyError
from slipstream.strategy import Strategy, presets
from slipstream.trace import chrome
from tests.cli.running import run
from tests.harness.traces import by_hand

_run = partial(run, "strategy")


def test_show(tmp_path):
    assert "by_bytes" in _run("show")
    assert "optimal" in _run("show", "exact")
    (tmp_path / "s.yaml").write_text("gradients: {split: per_layer}\n")
    assert "per_layer" in _run("show", str(tmp_path / "s.yaml"))


def test_presets():
    output = _run("presets")
    for name in presets():
        assert name in output


def test_schema():
    assert json.loads(_run("schema")) == Strategy.json_schema()


def test_check(tmp_path):
    file = tmp_path / "s.json"
    file.write_text("{}")
    assert _run("check", str(file)) == f"{file}: valid (reordered)\n"
    with pytest.raises(StrategyError, match="a strategy file ends in"):
        _run("check", "exact")
    file.write_text('{"local": {"steps": 16}, "gradients": {"codec": "int8"}}')
    with pytest.raises(StrategyError, match=r"local with gradients\.codec: .* local: \{codec"):
        _run("check", str(file))


def test_a_strategy_may_come_through_a_pipe(tmp_path):
    """It was opened twice, and nobody wrote to it the second time."""
    path = tmp_path / "strategy.yaml"
    os.mkfifo(path)

    is_read = Event()

    def write():
        path.write_text("gradients: {accumulate: 3}")
        while not is_read.is_set():  # for who opens it again
            path.write_text("")

    writer = Thread(target=write)
    writer.start()
    try:
        strategy = Strategy.load(path)
    finally:
        is_read.set()
        end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(end)
    assert strategy.gradients.accumulate == 3


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_no_strategy(tmp_path, name):
    file = tmp_path / name
    chrome.write(by_hand(), file)
    with pytest.raises(StrategyError, match=r"this is a trace [^\n]*; slipstream trace summary"):
        _run("check", str(file))
    with pytest.raises(StrategyError):  # no file may have such a name
        _run("check", "x" * 300 + name)


@pytest.mark.parametrize("command", ["show", "presets", "schema", "check"])
def test_help_has_an_example(command):
    assert f"Example: slipstream strategy {command}" in _run(command, "--help")


def test_mistakes_end_in_a_box_and_exit_code_2(tmp_path, monkeypatch, capsys):
    file = tmp_path / "s.yaml"
    file.write_text("gradients: {accumulate: 0}\n")
    monkeypatch.setattr("sys.argv", ["slipstream", "strategy", "check", str(file)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "StrategyError" in output.err
    assert "gradients.accumulate: got 0" in output.err
