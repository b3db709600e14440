"""The container files of examples/cluster, read as a builder reads them."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/cluster").glob("Containerfile.*"))
INSTRUCTIONS = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_there_are_files() -> None:
    assert [file.suffix for file in FILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_is_built_of_the_checkout_for_a_user_without_rights(file: Path) -> None:
    first, second, *_ = file.read_text().splitlines()
    assert f"-f examples/cluster/{file.name} " in first
    assert second.startswith("# Change: ")
    named = instructions(file)
    assert {name for name, _ in named} <= INSTRUCTIONS
    assert named[0][0] == "FROM"
    assert re.fullmatch(r"[a-z.]+(/[a-z]+)+:[\w.-]+", named[0][1])  # with its version
    copied: set[str] = set()
    user = False
    for name, rest in named:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied |= set(sources)
        elif name == "USER":
            user = rest.isdecimal() and int(rest) > 0  # a number, which runAsNonRoot can check
        elif name == "RUN":
            assert not user, f"{rest} has no rights any more"
            for command in rest.split(" && "):
                words = shlex.split(command)
                if words[:2] == ["pip", "install"]:
                    assert "--no-cache-dir" in words
                    assert words[words.index("-c") + 1] in copied
                    if (extra := re.fullmatch(r"\.\[(\w+)\]", words[-1])) is not None:
                        assert extra[1] in EXTRAS
                        assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= copied
    assert user
    assert any(name == "RUN" and rest.endswith("'.[examples]'") for name, rest in named)
