"""``slipstream trace``: the numbers arrive, mistakes end in one box."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from slipstream.cli import main
from slipstream.trace import write
from tests.trace.traces import by_hand


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.json.gz"
    write(by_hand(ranks=3), path)
    return str(path)


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, ["trace", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["no-such-file.json"], "cannot be read"), (["--rank", "9"], "rank 9 is not in the trace")],
)
def test_mistakes_end_in_a_box_and_code_2(monkeypatch, capsys, file, arguments, reason):
    given = arguments if "--rank" not in arguments else [file, *arguments]
    monkeypatch.setattr(sys, "argv", ["slipstream", "trace", "summary", *given])
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == 2
    box = " ".join(capsys.readouterr().err.split())
    assert "TraceError" in box
    assert reason in box
