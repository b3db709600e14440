"""A board of notes that the watches of several hosts share, in a store that one of them keeps.

A thread of its own talks to the store: a call does not return where the link to it is cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from slipstream.errors import ClusterError

POLL_SECONDS = 0.2
FLUSH_SECONDS = 2.0


class NoteStore(Protocol):
    """The part of torch's stores that is needed."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Board:
    """Notes by key, each written by one watch.

    Args:
        connect: makes the connection to the store; called again where it fails.
        prefix: of all keys.

    Attributes:
        reached: when the store has last answered, by the monotonic clock; None: not yet.
        refused: why the store is another run's; empty: it is not.
    """

    def __init__(self, connect: Callable[[], NoteStore], prefix: str = "watch") -> None:
        self.reached: float | None = None
        self.refused = ""
        self._connect, self._prefix = connect, prefix
        self._own: dict[str, str] = {}
        self._others: dict[str, tuple[str, float]] = {}
        self._wanted: set[str] = set()
        self._lock, self._written, self._closing = threading.Lock(), threading.Event(), False
        threading.Thread(target=self._talk, name="slipstream-board", daemon=True).start()

    def post(self, key: str, note: str) -> None:
        """Write a note, or another one in its place, soon."""
        with self._lock:
            self._own[key] = note
            self._written.clear()

    def read(self, key: str) -> tuple[str, float] | None:
        """A note, and since when it is this one; None: it is not there, or not asked for before."""
        self._wanted.add(key)
        return self._others.get(key)

    def flush(self) -> None:
        """Wait for a while until all notes are written."""
        self._written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Say no more."""
        self._closing = True

    def _talk(self) -> None:
        store: NoteStore | None = None
        while not self._closing:
            try:
                store = store or self._connect()
                self._talk_once(store)
                self.reached = time.monotonic()
            except ClusterError as error:
                self.refused = str(error)
                return
            except (RuntimeError, OSError):  # nobody listens, yet or any more
                pass
            time.sleep(POLL_SECONDS)

    def _talk_once(self, store: NoteStore) -> None:
        with self._lock:
            own = dict(self._own)
        for key, note in own.items():
            store.set(f"{self._prefix}/{key}", note)
            with self._lock:
                if self._own.get(key) == note:
                    del self._own[key]
        with self._lock:
            if not self._own:
                self._written.set()
        for key in [*self._wanted]:
            if store.check([f"{self._prefix}/{key}"]):
                note = store.get(f"{self._prefix}/{key}").decode()
                before = self._others.get(key)
                if before is None or before[0] != note:
                    self._others[key] = note, time.monotonic()
