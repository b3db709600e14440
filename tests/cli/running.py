"""Commands of ``slipstream``, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from slipstream.cli import main


def run(*words: object) -> str:
    """Run a command on a terminal of 120 columns, with success; returns its output."""
    terminal = CliRunner(env={"COLUMNS": "120"})
    result = terminal.invoke(main.app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
