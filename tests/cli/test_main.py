"""The command line as a whole: its version, and that what README shows can be typed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import slipstream
from slipstream.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()
SHOWN = re.findall(r"^\$ slipstream (.*?)(?: {2,}#.*)?$", README, re.MULTILINE)


def test_the_version(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"slipstream {slipstream.__version__}\n"


def test_readme_shows_commands() -> None:
    assert {line.split()[0] for line in SHOWN} >= {"launch", "trace", "plan", "tune", "report"}


@pytest.mark.parametrize("line", SHOWN)
def test_what_readme_shows_exists(line: str) -> None:
    command, words = get_command(main.app), shlex.split(line)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    own = words[: words.index("--")] if "--" in words else words
    assert {word for word in own if word.startswith("-")} <= options
