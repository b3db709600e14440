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
class Flight:
    """One exchange; times in seconds of the monotonic clock."""

    number: int
    what: str
    names: Sequence[str] = ()
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def end(self) -> None:
        """Note that nobody waits for it any more."""
        self.ended = time.monotonic()


class FlightLog:
    """Remembers the last exchanges in the order in which they began.

    Example:
        >>> log = FlightLog()
        >>> first = log.begin("segment 1 of 2", ["weight"])
        >>> second = log.begin("segment 2 of 2")
        >>> first.end()
        >>> [flight.what for flight in log.flights if flight.ended is None], log.begun
        (['segment 2 of 2'], 2)
    """

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque(maxlen=KEPT)
        self.begun = 0

    def begin(self, what: str, names: Sequence[str] = ()) -> Flight:
        """Note an exchange that begins now."""
        self.begun += 1
        flight = Flight(self.begun, what, names)
        self._flights.append(flight)
        return flight

    @property
    def flights(self) -> list[Flight]:
        """The last ones, oldest first."""
        while True:
            try:
                return list(self._flights)
            except RuntimeError:  # another thread has begun one meanwhile
                continue


FLIGHTS = FlightLog()
"""Those of this process, of whatever session or hook."""
