"""Precision in a session: the battery, on one rank and on two, and what a user may do besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import Ranks
from tests.precision.battery import CASES, holds


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "codec" not in str(c)])
def test_every_precision_holds_on_one_process(name: str) -> None:
    holds(CASES[name], "cpu")


@pytest.mark.parametrize("name", CASES)
def test_every_precision_holds_on_two_ranks(two: Ranks, name: str) -> None:
    two.run(holds, CASES[name], "cpu")
