"""Fixtures of the tests of loaders."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_plain_loader() -> Iterator[None]:
    """As if no plain loader had had workers in this process: with its first ones torch has its say
    wherever the main thread is when a worker ends."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)
