"""The last exchanges of this process: what was begun, when, and whether it has ended.

Kept for whoever asks why a run hangs, from any thread; an exchange costs one object.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT = 32
"""Exchanges that are remembered."""


@dataclass(slots=True)
class LoggedExchange:
    """One exchange; times in seconds of the monotonic clock."""

    number: int
    what: str
    names: Sequence[str] = ()
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def end(self) -> None:
        """Note that nobody waits for it any more."""
        self.ended = time.monotonic()


class ExchangeLog:
    """Remembers the last exchanges in the order in which they began.

    Example:
        >>> log = ExchangeLog()
        >>> first = log.begin("segment 1 of 2", ["weight"])
        >>> second = log.begin("segment 2 of 2")
        >>> first.end()
        >>> [exchange.what for exchange in log.exchanges if exchange.ended is None], log.begun
        (['segment 2 of 2'], 2)
    """

    def __init__(self) -> None:
        self._exchanges: deque[LoggedExchange] = deque(maxlen=KEPT)
        self.begun = 0

    def begin(self, what: str, names: Sequence[str] = ()) -> LoggedExchange:
        """Note an exchange that begins now."""
        self.begun += 1
        exchange = LoggedExchange(self.begun, what, names)
        self._exchanges.append(exchange)
        return exchange

    @property
    def exchanges(self) -> list[LoggedExchange]:
        """The last ones, oldest first."""
        while True:
            try:
                return list(self._exchanges)
            except RuntimeError:  # another thread has begun one meanwhile
                continue


EXCHANGES = ExchangeLog()
"""Those of this process, of whatever session or hook."""
