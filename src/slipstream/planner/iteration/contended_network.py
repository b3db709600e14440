"""Simulate exchanges that share a network, each slowing the others down.

It knows phases of exchanges and when ranks compute, not what is exchanged or computed.

[Note: Two ways to share]
The backend's collectives start in order, two at a time, and share the network in equal parts. Of
direct sends (``in_order``) two at a time wait for their latency, and the bytes of all others queue:
the network serves first what was sent first, and later ones get what the earlier ones leave of it.

[Note: Two clocks]
``time`` is seconds; ``work`` is the seconds that compute would have taken without exchanges. While
an exchange is in flight, work advances ``1 + compute_slowdown`` times slower, on all ranks alike.
Direct sends count as in flight from the mean hand-over on: ranks do not wait for each other.
What ranks do is therefore planned in work, and only the handful of starts and ends of exchanges
connect the two clocks: a step of thousands of ranks costs hardly more than one of four.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from slipstream.planner.iteration.tasks import Phase
from slipstream.planner.network.costs import Contention
from slipstream.planner.network.fit import Array

IN_FLIGHT = 2
"""Collectives of a rank in flight at a time: gloo has two threads."""

_INSTANT = 1e-10  # moments less than a nanosecond apart are one
_NOTHING = 1e-9  # of a network, that is left of it


class Job(NamedTuple):
    """An exchange: the work at which the last rank has handed it over, and its phases.

    From ``begun`` on, what the others have sent already slows computing down.
    """

    ready: float
    phases: tuple[Phase, ...]
    begun: float = inf


class Completion(NamedTuple):
    """When an exchange started and ended, in time, and the work at its end."""

    start: float
    end: float
    work: float


IdleFrom = Callable[[Sequence[Completion | None]], Sequence[float]]
"""From the exchanges completed so far (None: not yet) to the work at which each rank has nothing
left to compute, ascending."""


class NetworkClock:
    """Time as a function of work: piecewise linear, at the full rate after the last piece."""

    def __init__(self) -> None:
        self.time = self.work = 0.0
        self._times, self._works = [0.0], [0.0]
        self._line: tuple[Array, Array] | None = None  # as arrays, until the clock advances

    def advance(self, seconds: float, rate: float) -> None:
        """Let seconds pass while work advances at ``rate``."""
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


@dataclass(slots=True, eq=False)
class _InFlight:
    """An exchange in flight: the phases to come, and the seconds left of the present one."""

    number: int
    start: float
    phases: deque[Phase]
    seconds_left: float
    since: float
    """When the present phase began."""


_Flying = Mapping[str | None, Sequence[_InFlight]]
"""The exchanges in flight by the network of their present phase (None: latency), in the order in
which that began."""

_Stretches = Callable[[_Flying, Contention, float], list[tuple[_InFlight, float]]]
"""The exchanges that advance, and how many times as long as alone the present phase of each takes.

Gets all in flight, how much computing and exchanging slow each other down, and the share of ranks
that compute.
"""


def _side_by_side(
    flying: _Flying, contention: Contention, computing: float
) -> list[tuple[_InFlight, float]]:
    sending = {network: queue for network, queue in flying.items() if network is not None}
    longest = max((one.phases[0].seconds for q in sending.values() for one in q), default=0.0)
    queued = min(contention.queue_share * longest, contention.queue_seconds)
    slowed = 1.0 + contention.latency_slowdown * computing
    stretches = [
        (one, max(queued / max(one.phases[0].seconds, 1e-30), slowed))
        for one in flying.get(None, ())
    ]
    slowed = 1.0 + contention.exchange_slowdown * computing
    for queue in sending.values():
        demand = sum(one.phases[0].demand for one in queue)
        stretches += [
            (one, max(demand / max(one.phases[0].demand, 1.0), 1.0) * slowed) for one in queue
        ]
    return stretches


def _one_behind_the_other(
    flying: _Flying, contention: Contention, computing: float
) -> list[tuple[_InFlight, float]]:
    slowed = 1.0 + contention.latency_slowdown * computing
    stretches = [(one, slowed) for one in flying.get(None, ())]
    slowed = 1.0 + contention.exchange_slowdown * computing
    for network, queue in flying.items():
        left = 1.0
        for one in queue if network is not None else ():
            demand = min(one.phases[0].demand, 1.0)
            served = min(demand, left)
            left -= served
            stretches.append((one, (1.0 if served == demand else demand / served) * slowed))
            if left <= _NOTHING:
                break
    return stretches


def run(
    jobs: Sequence[Job],
    clock: NetworkClock,
    idle_from: IdleFrom,
    contention: Contention,
    in_order: bool = False,
) -> list[Completion]:
    """Run the jobs in order, and advance the clock to the end of the last one.

    From event to event: between two of them no exchange begins, changes its phase or ends, and no
    rank stops computing, so all rates are constant.

    Args:
        jobs: by ascending ``ready``.
        clock: stands at the end of the previous jobs.
        idle_from: tells when ranks stop computing.
        contention: how much computing and exchanging slow each other down.
        in_order: as direct sends do; see the note at the top of the file.
    """
    stretches_of: _Stretches = _one_behind_the_other if in_order else _side_by_side
    completions: list[Completion | None] = [None] * len(jobs)
    flying: defaultdict[str | None, list[_InFlight]] = defaultdict(list)
    idle, next_job, num_flying = idle_from(completions), 0, 0
    while num_flying or next_job < len(jobs):
        waiting = len(flying[None]) if in_order else num_flying
        may_start = next_job < len(jobs) and waiting < IN_FLIGHT
        if may_start and jobs[next_job].ready <= clock.work + _INSTANT:
            phases, now = deque(jobs[next_job].phases), clock.time
            _add(_InFlight(next_job, now, phases, phases[0].seconds, now), flying)
            next_job, num_flying = next_job + 1, num_flying + 1
            continue
        begun = jobs[next_job].begun if next_job < len(jobs) else inf
        slowed = bool(num_flying) or begun <= clock.work + _INSTANT
        rate = 1.0 / (1.0 + contention.compute_slowdown) if slowed else 1.0
        num_idle = bisect_right(idle, clock.work + _INSTANT)
        computing = 1.0 - num_idle / len(idle)
        stretches = stretches_of(flying, contention, computing)
        seconds = (jobs[next_job].ready - clock.work) / rate if may_start else inf
        if not slowed:
            seconds = min(seconds, begun - clock.work)
        if num_flying and num_idle < len(idle):
            seconds = min(seconds, (idle[num_idle] - clock.work) / rate)
        for one, stretch in stretches:
            seconds = min(seconds, one.seconds_left * stretch)
        clock.advance(seconds, rate)
        ended = _after(seconds, stretches, flying, clock.time)
        for one in ended:
            completions[one.number] = Completion(one.start, clock.time, clock.work)
        if ended:
            idle, num_flying = idle_from(completions), num_flying - len(ended)
    return [completion for completion in completions if completion is not None]


def _add(one: _InFlight, flying: Mapping[str | None, list[_InFlight]]) -> None:
    insort(flying[one.phases[0].network], one, key=lambda one: (one.since, one.number))


def _after(
    seconds: float,
    stretches: Sequence[tuple[_InFlight, float]],
    flying: Mapping[str | None, list[_InFlight]],
    now: float,
) -> list[_InFlight]:
    """Return what has ended after so many seconds; others may begin their next phase."""
    for one, stretch in stretches:
        one.seconds_left -= seconds / stretch
    over = [one for one, _ in stretches if one.seconds_left <= _INSTANT]
    for one in over:
        flying[one.phases.popleft().network].remove(one)
        if one.phases:
            one.seconds_left, one.since = one.phases[0].seconds, now
            _add(one, flying)
    return [one for one in over if not one.phases]
