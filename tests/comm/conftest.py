"""Ranks for the tests of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import Ranks


@pytest.fixture(scope="package")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks
