"""Ranks for the files of tests that ask for them, started once a file; and what tests leave."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.harness.forks import forking
from tests.harness.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _forks() -> Iterator[tuple[str, Callable[[], None]]]:
    with forking() as server:
        yield server


@pytest.fixture
def forks(_forks: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> str:
    """What takes the place of ``sys.executable``: commands start forks; see `harness.forks`."""
    program, check = _forks
    check()
    monkeypatch.setattr(sys, "executable", program)
    return program


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Put back those that a command, called in this process, has replaced."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
