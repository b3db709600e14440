"""The site of the docs: its navigation, its API pages, and that both builders read a page alike."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipstream
from slipstream import strategy
from tests.test_docs import LINK, ROOT, anchors

PARTS = re.findall(r"^PAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
"""What the site is made of."""
PAGES = sorted(
    page
    for part in PARTS
    for page in ((ROOT / part).rglob("*.md") if (ROOT / part).is_dir() else [ROOT / part])
)
API = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
ITEM = re.compile(r"( *)(?:[-*]|\d+\.) ")


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml; what names a Python object is its name."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda _, name, node: name)


def navigation(entry: Any) -> list[str]:
    match entry:
        case str():
            return [entry]
        case dict():
            return [page for part in entry.values() for page in navigation(part)]
    return [page for part in entry for page in navigation(part)]


def settings() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_navigation_has_every_page_once() -> None:
    listed = navigation(settings()["nav"])
    assert sorted(listed) == [str(page.relative_to(ROOT)) for page in PAGES]


def test_every_technique_names_its_source() -> None:
    [techniques] = [part["Techniques"] for part in settings()["nav"] if "Techniques" in part]
    pages = [ROOT / page for page in navigation(techniques)]
    without = {page.stem for page in pages if "## Source" not in page.read_text()}
    # the loop and its settings; `local` has its sources where it uses them
    assert without == {"session", "strategy", "checkpoints", "local"}


def outside(page: Path) -> list[str]:
    """Links of a page that would lead out of the site."""
    inside = [ROOT / part for part in (*PARTS, "benchmarks/results")]
    targets = {
        link: (page.parent / link.partition("#")[0]).resolve()
        for link in LINK.findall(prose(page))
        if "://" not in link and not link.startswith("#")
    }
    return [
        link
        for link, target in targets.items()
        if not any(target.is_relative_to(part) for part in inside)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_stays_inside_the_site(page: Path) -> None:
    assert outside(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_leads_to_a_repeated_heading(page: Path) -> None:
    """Code hosts call its anchor name-1, the site name_1."""
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if "://" not in link and (first := anchor.removesuffix("-1")) != anchor:
            assert first not in anchors((page.parent / path).resolve() if path else page)


def badly_indented(text: str) -> list[str]:
    """Lines of lists that Python-Markdown, which makes the site, reads unlike code hosts."""
    wrong = []
    in_list = in_paragraph = False
    for before, line in pairwise(["", *text.splitlines()]):
        indent = len(line) - len(line.lstrip())
        if ITEM.match(line):
            begins = not in_list or in_paragraph
            wrong += [line] if indent % 4 or (begins and before.strip()) else []
            in_list, in_paragraph = True, False
        elif line.strip() and not before.strip():
            wrong += [line] if in_list and indent % 4 else []
            in_list = in_paragraph = in_list and indent > 0
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_quotes_are_read_alike(page: Path) -> None:
    assert badly_indented(prose(page)) == []
    # A comment that begins a line ends the paragraph.
    assert re.findall(r"(?<=[^\s>]\n)<!-- \w+: \S+ -->", prose(page)) == []


def test_a_list_that_is_read_otherwise_is_found() -> None:
    assert badly_indented("Text\n- item") == ["- item"]
    assert badly_indented("- a\n  - b\n\n  paragraph") == ["  - b", "  paragraph"]
    assert badly_indented("1. a\n\n    paragraph\n2. b") == ["2. b"]
    assert badly_indented("Text\n\n- a\n  more\n\n    paragraph\n\n    - b\n- c\n\nText") == []


def test_the_api_has_every_public_name_and_no_other() -> None:
    shown = re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)
    assert len(shown) == len(set(shown))
    names = {f"slipstream.{name}" for name in slipstream.__all__} - {
        "slipstream.__version__",
        "slipstream.HangError",
        "slipstream.Strategy",
        "slipstream.SlipstreamError",
    }
    types = {
        f"slipstream.strategy.{name}"
        for name, value in vars(strategy).items()
        if name.endswith("Config") and isinstance(value, type)
    }
    assert names | types <= set(shown)
    assert [name for name in shown if not exists(name)] == []
    assert not exists("slipstream.Sesion")
    assert not exists("slipstream.optim.Adam")


def exists(name: str) -> bool:
    """Whether a module has that name, read from its text: importing adapters takes seconds."""
    path, _, last = name.rpartition(".")
    room = find_spec(path)
    text = Path(room.origin).read_text() if room and room.origin else ""
    named = rf"^(?:class|def) {last}\b|^from .* import .*\b{last}\b| as {last}\b"
    module = ROOT / "src" / Path(*name.split("."))
    return (
        re.search(named, text, re.MULTILINE) is not None
        or module.is_dir()
        or module.with_suffix(".py").is_file()
    )


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs pip install '.[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = import_module("mkdocs.commands.build")
    config = import_module("mkdocs.config")
    pages = tmp_path / "pages"
    for part in PARTS:
        target = pages / part
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, target)
    for picture in (ROOT / "benchmarks/results").glob("*.png"):
        shutil.copy(picture, pages / "benchmarks/results")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")  # the theme sets it
    monkeypatch.chdir(ROOT)
    build.build(
        config.load_config(
            str(ROOT / "mkdocs.yml"),
            docs_dir=str(pages),
            site_dir=str(tmp_path / "site"),
            strict=True,
        )
    )
    assert (tmp_path / "site/docs/tutorial/index.html").is_file()
