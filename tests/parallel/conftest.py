"""Ranks for the tests of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import Ranks


@pytest.fixture(scope="package")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
