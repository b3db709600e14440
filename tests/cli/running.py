"""Commands of ``slipstream``, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from slipstream.cli import main

SMALL = """
import json, sys
from slipstream.calibration import codec_cost
from slipstream.cli import main
from slipstream.cli.doctor import command, measure
command.MEASURE = "small"
codec_cost.ROUNDS, codec_cost.WINDOW, codec_cost.SHORTEST = 1, 0.002, 0.002
main.main() if sys.argv[1] == "doctor" else measure.measure(**json.loads(sys.argv[1]))
"""
"""The file small.py: ``slipstream`` as a module, whose ``doctor network`` measures in less time."""


def run(*words: object) -> str:
    """Run a command on a terminal of 120 columns, with success; returns its output."""
    terminal = CliRunner(env={"COLUMNS": "120"})
    result = terminal.invoke(main.app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
