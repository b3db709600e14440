"""README and docs: links lead somewhere, every room has a page, README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "examples/README.md",
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


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


def test_every_room_has_a_page() -> None:
    rooms = {p.parent.name for p in (ROOT / "src/slipstream").glob("*/__init__.py")}
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert rooms - pages == {"analysis"}  # part of the page on traces


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"({p.name})" not in index] == [
        "README.md"
    ]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
