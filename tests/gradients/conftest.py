"""Pools of ranks that all tests of the engine share."""

from __future__ import annotations

import pytest

from tests.harness.ranks import Ranks


@pytest.fixture(scope="package")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def four():
    with Ranks(4) as ranks:
        yield ranks
