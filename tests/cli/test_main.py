"""The command line as a whole: its version, its help, and that documented commands can be typed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import slipstream
from slipstream.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^\$ slipstream (.*?)(?: {2,}#.*)?$", re.MULTILINE)
SHOWN = sorted({line for page in PAGES for line in COMMAND.findall(page.read_text())})


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = list(commands(get_command(main.app)))


def test_the_version(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"slipstream {slipstream.__version__}\n"


def test_ctrl_c_while_it_is_imported_ends_it_quietly(monkeypatch, capsys) -> None:
    """It printed a traceback; torch takes seconds."""

    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == main.__name__:
                raise KeyboardInterrupt

    program = "slipstream.__main__"
    monkeypatch.delitem(sys.modules, program, raising=False)
    monkeypatch.delitem(sys.modules, main.__name__)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        import_module(program)
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_the_help_flows_on_a_terminal_narrower_than_the_source(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["slipstream", "plan", "--help"])
    with pytest.raises(SystemExit):
        main.main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "--rate, for another one; those are extrapolated, and marked so." in lines
    assert "slipstream plan --shape shape.yaml --ranks 64,512,4096" in lines


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="stands for a disk without space")
def test_a_full_disk_is_told_in_one_box(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "strategy", "show"])
    with suppress(OSError), open("/dev/full", "w") as full:  # closing writes what is left
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main.main()
    assert ended.value.code == 2
    assert "No space left on device: free some space" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("do", {"doctor"}),
        ("trace s", {"summary"}),
        ("launch --nn", {"--nnodes"}),
        ("--inst", {"--install-completion"}),
    ],
)
def test_a_shell_completes_commands_and_options(
    typed: str, completed: set[str], monkeypatch, capsys
) -> None:
    words = ["slipstream", *typed.split()]
    monkeypatch.setattr(sys, "argv", words[:1])
    monkeypatch.setenv("_SLIPSTREAM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == completed


def test_the_docs_show_every_command() -> None:
    documented = {tuple(line.split()[: len(path)]) for line in SHOWN for path in COMMANDS}
    assert set(COMMANDS) - documented == set()


@pytest.mark.parametrize("line", SHOWN)
def test_a_documented_command_exists_with_its_options(line: str) -> None:
    command: Any = get_command(main.app)
    words = shlex.split(line)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    before_script = words[: words.index("--")] if "--" in words else words
    given = {word for word in before_script if word.startswith("-")}
    if command.name == "launch":  # what follows the script is the script's
        given -= {"--epochs"}
    assert given <= options


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_explains_every_option_and_shows_an_example(path: tuple[str, ...]) -> None:
    command: Any = get_command(main.app)
    for name in path:
        command = command.commands[name]
    assert [param.name for param in command.params if not getattr(param, "help", "")] == []
    result = CliRunner(env={"COLUMNS": "120"}).invoke(main.app, [*path, "--help"])
    shown = " ".join(result.output.split())
    assert shown.count(f"slipstream {' '.join(path)}") >= 2 or "Example: slipstream" in shown
