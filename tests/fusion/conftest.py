"""Fixtures of the tests of fused chains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fusion.uncompiled import uncompiled


@pytest.fixture
def without_compilation() -> Iterator[None]:
    with uncompiled():
        yield
