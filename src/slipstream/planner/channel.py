"""How exchanges go through the network beside compute: in order, two at a time, slowing each other.

Never knows what is exchanged, nor what the ranks compute.

[Note: Two clocks]
``time`` is seconds; ``work`` is the seconds that compute would have taken alone. While an exchange
moves, work passes ``1 + compute_slowdown`` times slower, on all ranks alike. What ranks do is
therefore planned in work, and only the handful of events of exchanges tie the two clocks together:
a step of thousands of ranks costs hardly more than one of four.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.planner.exchange import Phase

Array = NDArray[np.float64]

IN_FLIGHT = 2
"""Exchanges of a rank that move at a time: gloo's two threads."""

_INSTANT = 1e-10  # below a nanosecond two moments are one


class Contention(Protocol):
    """What computing and exchanging cost each other; a ``cost.Cluster`` is one."""

    @property
    def compute_slowdown(self) -> float: ...
    @property
    def exchange_slowdown(self) -> float: ...
    @property
    def latency_slowdown(self) -> float: ...
    @property
    def queue_share(self) -> float: ...
    @property
    def queue_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Job:
    """An exchange: the work at which the last rank has handed it over, and its phases."""

    ready: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class Landing:
    """When an exchange moved, in time, and the work at its end."""

    start: float
    end: float
    work: float


Idle = Callable[[Sequence[Landing | None]], Sequence[float]]
"""The work at which each rank has nothing to compute any more, ascending, given what landed."""


class Clock:
    """Time over work: a line of pieces, of which the last one goes on at the full rate."""

    def __init__(self) -> None:
        self.time = self.work = 0.0
        self._times, self._works = [0.0], [0.0]
        self._line: tuple[Array, Array] | None = None

    def advance(self, seconds: float, rate: float) -> None:
        """Let seconds pass, of which ``rate`` is work."""
        self.time += seconds
        self.work += seconds * rate
        self._times.append(self.time)
        self._works.append(self.work)
        self._line = None

    def times_of(self, work: Array) -> Array:
        """The times at which so much work was done."""
        if self._line is None:
            self._line = np.array(self._works), np.array(self._times)
        times = np.interp(work, *self._line)
        return np.asarray(times + np.maximum(work - self.work, 0.0) + np.minimum(work, 0.0))


@dataclass(slots=True)
class _Flight:
    """An exchange that moves: the phases to come, and the seconds left of the present one."""

    number: int
    start: float
    phases: list[Phase]
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.phases[0].seconds

    def pace(self, flights: Sequence[_Flight]) -> float:
        """How many times as long the present phase takes for others on its network."""
        network = self.phases[0].network
        if network is None:
            return 1.0
        together = sum(f.phases[0].demand for f in flights if f.phases[0].network == network)
        return max(together / max(self.phases[0].demand, 1.0), 1.0)

    def slowed(self, contention: Contention, computing: float, flights: Sequence[_Flight]) -> float:
        """The same for the share of ranks that compute, and for messages that wait in a queue."""
        phase = self.phases[0]
        if phase.network is not None:
            return 1.0 + contention.exchange_slowdown * computing
        moving = (f.phases[0] for f in flights)
        longest = max((other.seconds for other in moving if other.network is not None), default=0.0)
        queued = min(contention.queue_share * longest, contention.queue_seconds)
        return max(
            queued / max(phase.seconds, 1e-30), 1.0 + contention.latency_slowdown * computing
        )

    def go_on(self) -> bool:
        """Begin the next phase; False if that was the last one."""
        del self.phases[0]
        self.left = self.phases[0].seconds if self.phases else 0.0
        return bool(self.phases)


def run(
    jobs: Sequence[Job],
    clock: Clock,
    idle: Idle,
    contention: Contention,
) -> list[Landing]:
    """Let the jobs through, in order, and the clock with them.

    Args:
        jobs: ready in ascending order.
        clock: stands where the jobs before ended; stands at the end of the last job afterwards.
        idle: tells when ranks rest.
        contention: what computing and exchanging cost each other.
    """
    landings: list[Landing | None] = [None] * len(jobs)
    flights: list[_Flight] = []
    rests, following = idle(landings), 0
    while flights or following < len(jobs):
        room = following < len(jobs) and len(flights) < IN_FLIGHT
        if room and jobs[following].ready <= clock.work + _INSTANT:
            flights.append(_Flight(following, clock.time, list(jobs[following].phases)))
            following += 1
            continue
        rate = 1.0 / (1.0 + contention.compute_slowdown) if flights else 1.0
        resting = bisect_right(rests, clock.work + _INSTANT)
        computing = 1.0 - resting / len(rests)
        paces = [
            flight.pace(flights) * flight.slowed(contention, computing, flights)
            for flight in flights
        ]
        seconds = (jobs[following].ready - clock.work) / rate if room else inf
        if flights and resting < len(rests):
            seconds = min(seconds, (rests[resting] - clock.work) / rate)
        for flight, pace in zip(flights, paces, strict=True):
            seconds = min(seconds, flight.left * pace)
        clock.advance(seconds, rate)
        for flight, pace in zip(flights, paces, strict=True):
            flight.left -= seconds / pace
        down = [f for f in flights if f.left <= _INSTANT and not f.go_on()]
        for flight in down:
            flights.remove(flight)
            landings[flight.number] = Landing(flight.start, clock.time, clock.work)
        if down:
            rests = idle(landings)
    return [landing for landing in landings if landing is not None]
