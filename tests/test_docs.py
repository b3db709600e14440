"""README and docs: links lead somewhere, strategies and options are valid, README stays short."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from slipstream.cli.main import app
from slipstream.errors import StrategyError
from slipstream.strategy import Strategy

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples/README.md",
    ROOT / "examples/cluster/README.md",
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w.]+/)+\w+\.py)")


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    slugs: set[str] = set()
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while slug in slugs:  # a repeated heading gets a number
            number += 1
            slug = f"{slug.removesuffix(f'-{number - 1}')}-{number}"
        slugs.add(slug)
    return slugs


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in LINK.findall(text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n# One\n[a](#one-1) [b](#two) [c](other.md) [d](https://x.y)")
    assert broken_links(page) == ["#two", "other.md"]


def missing_files(text: str) -> list[str]:
    """Files that a page names between backticks and that are not there."""
    roots = (ROOT, ROOT / "src", ROOT / "src/slipstream")
    return [name for name in FILE.findall(text) if not any((r / name).exists() for r in roots)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(page: Path) -> None:
    assert missing_files(page.read_text()) == []


def test_a_file_that_is_gone_is_found() -> None:
    text = "`planner/curve.py`, `planner/network/curve.py` and `planner/network/trust.py::Curve`"
    assert missing_files(text) == ["planner/curve.py", "planner/network/trust.py"]


def test_every_room_has_a_page() -> None:
    rooms = {p.parent.name for p in (ROOT / "src/slipstream").glob("*/__init__.py")}
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    # parts of the pages on traces, codecs and security; checkpoints.md, doctor.md
    assert rooms - pages == {"analysis", "checkpoint", "ddp", "files", "health"}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"({p.name})" not in index] == [
        "README.md"
    ]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def strategies(text: str) -> list[dict[str, Any]]:
    """What a page shows of strategy files: blocks of YAML, and settings between backticks.

    A block that names a group again shows another strategy from there on.
    """
    groups = "|".join(Strategy.model_fields)
    shown = re.findall(rf"`((?:{groups}): [^`]+)`", text)
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        lines: list[str] = []
        named: set[str] = set()
        for line in block.splitlines():
            group = re.match(r"\w+(?=:)", line)
            if group and group[0] in named:
                shown.append("\n".join(lines))
                lines, named = [], set()
            named |= {group[0]} if group else set()
            lines.append(line)
        if named <= set(Strategy.model_fields):
            shown.append("\n".join(lines))
    return [yaml.safe_load(one) for one in shown if "..." not in one]


def wrong_options(text: str) -> list[str]:
    """Options of ``slipstream`` commands on a page that they do not have."""
    wrong = []
    typed = re.findall(r"^(?: {4,}|\$ )(?:\w.* )?(slipstream .*)$", text, re.MULTILINE)
    for line in (*typed, *re.findall(r"`(slipstream [a-z][^`]* -[^`]*)`", text)):
        _, *words = shlex.split(line, comments=True)
        command: Any = get_command(app)
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        own = takewhile(lambda word: word not in ("--", "-m") and ".py" not in word, words)
        wrong += [f"{line}: {word}" for word in own if word[0] == "-" and word not in known]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_strategies_and_options_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    for strategy in strategies(text):
        Strategy.load(strategy)
    assert wrong_options(text) == []


def test_a_stale_strategy_and_a_stale_option_are_found() -> None:
    text = (
        "`data: {cash: {}}`\n```yaml\ngradients: {codec: half}\ngradients: {split: single}\n```\n"
    )
    assert strategies(text) == [
        {"data": {"cash": {}}},
        {"gradients": {"codec": "half"}},
        {"gradients": {"split": "single"}},
    ]
    with pytest.raises(StrategyError, match="cash"):
        Strategy.load(strategies(text)[0])
    shown = "$ srun slipstream doctor network --node 4\n$ slipstream launch --nproc 2 a.py --node 3"
    assert wrong_options(shown) == ["slipstream doctor network --node 4: --node"]
