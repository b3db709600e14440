"""docs/doctor.md has a row for every check, in the words of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slipstream.health.diagnosis import HealthCheck
from slipstream.health.judge import CLUSTER_CHECKS, HOST_CHECKS

PAGE = Path(__file__).parents[2] / "docs/doctor.md"
CHECKS: tuple[HealthCheck[Any], ...] = (*HOST_CHECKS, *CLUSTER_CHECKS)


def table() -> str:
    """The table of all checks; ``python -m tests.health.test_page`` writes it."""
    rows = ["| check | what is read | healthy | otherwise | fix |", "|---|---|---|---|---|"]
    rows += [f"| {c.name} | {c.reads} | {c.healthy} | {c.effect} | {c.fix} |" for c in CHECKS]
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with the table of the code."""
    marks = r"(<!-- checks -->\n).*?(<!-- / -->)"
    return re.sub(marks, lambda m: f"{m[1]}{table()}\n{m[2]}", page, flags=re.DOTALL)


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    assert table() in page
    assert filled(page) == page


def test_names_of_checks_are_different() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len({*names}) > 25


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
