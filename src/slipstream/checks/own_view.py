"""A rank as it sees itself: where it is, whether it lives, how long an update takes it."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from slipstream.checks.autopsy import RankState
from slipstream.checks.stacks import CallSite, main_place
from slipstream.checks.vitals import Vitals, process_table, vitals
from slipstream.transport.exchange_log import EXCHANGES

FIRST_UPDATES = 2
"""Until so many are done, a session compiles, and reads for the first time."""
NAMES = 8
"""Of gradients in an exchange, at most."""


@dataclass(slots=True)
class UpdateCount:
    """Updates that are done: ``step`` of the whole run, ``updates`` of this session, which has made
    so many backward ``passes``; seconds that they have waited for other ranks; and the thread that
    made the last one."""

    step: int = 0
    updates: int = 0
    passes: int = 0
    waited: float = 0.0
    thread: threading.Thread | None = None

    def reached(self, step: int) -> None:
        """Note that an update has ended, the ``step``-th."""
        self.step = step
        self.updates += 1
        self.thread = threading.current_thread()


class OwnView:
    """Looks at this process, from whichever thread asks.

    The thread that makes it trains, as long as it lives, until another one makes an update: Ray
    Train's is not the main one.

    Args:
        rank: of this process.
        host: of this process.
        progress: how many updates are done.
        spins: whether a thread that waits for the device computes, so that computing is no sign of
            life.
        window: seconds over which the time of an update is taken.

    Attributes:
        looked: when it last looked, on the monotonic clock.
        alive: when it last saw a sign of life.
    """

    def __init__(
        self, rank: int, host: str, progress: UpdateCount, *, spins: bool, window: float
    ) -> None:
        self._rank, self._host, self._progress = rank, host, progress
        self._processes = process_table()
        self._maker = threading.current_thread()
        self._spins, self._window = spins, window
        self.looked = self.alive = time.monotonic()
        self._place: CallSite | None = None
        self._vitals, self._done = Vitals(), 0  # when it last lived
        self._counted = replace(progress), self.looked  # from where an update's time is taken
        self._seconds = 0.0

    def begin_anew(self) -> None:
        """Take the next look for a sign of life: this process was stopped."""
        self._place = None

    def sees(self, other: RankState) -> bool:
        """Whether the process of another rank can be looked at from here: it is of this host, and
        in no container with numbers of its own."""
        same_numbers = bool(other.processes) and other.processes == self._processes
        return other.host == self._host and same_numbers

    def state(self, now: float, ended: str = "") -> RankState:
        """Look, and say where this rank is.

        Args:
            now: on the monotonic clock.
            ended: why it has left; empty: it has not.
        """
        thread = self._progress.thread or self._maker
        thread = thread if _lives(thread) else threading.main_thread()
        place = main_place(thread)
        # of the main thread a fork keeps the parent's number
        trains = None if thread is threading.main_thread() else thread.native_id
        signs = vitals(os.getpid(), threading.get_native_id(), trains=trains)
        moves_on = self._place is None or place.key != self._place.key
        done = self._progress.updates + self._progress.passes
        moves_on |= done != self._done  # between two looks, maybe
        # since it last lived, not since the last look: the kernel counts by ticks
        seconds, computing = now - self.alive, not self._spins
        if moves_on or signs.show_life_since(self._vitals, seconds, computing=computing):
            self.alive, self._vitals, self._done = now, signs, done
        self._place, self.looked = place, now
        exchange, names = "", tuple[str, ...]()
        if place.exchanging:
            under_way = next((one for one in EXCHANGES.exchanges if one.ended is None), None)
            exchange = "an exchange" if under_way is None else under_way.what
            names = () if under_way is None else tuple(under_way.names[:NAMES])
        return RankState(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            processes=self._processes,
            step=self._progress.step,
            young=self._progress.updates < FIRST_UPDATES,
            line=place.line,
            verb=place.verb,
            exchange=exchange,
            names=names,
            number=EXCHANGES.begun,
            seconds=self._own_seconds(now),
            loading=place.loading,
            asking=place.asking,
            still=round(now - self.alive, 1),
            ended=ended,
            thread=thread.name,
        )

    def _own_seconds(self, now: float) -> float:
        """Seconds that this rank takes for an update of its own, in the last while; 0: unknown."""
        (before, since), progress = self._counted, self._progress
        if now - since >= self._window:
            updates, waited = progress.updates - before.updates, progress.waited - before.waited
            self._seconds = (now - since - waited) / updates if updates else 0.0
            self._counted = replace(progress), now
        return self._seconds


def last_exchanges(now: float) -> list[str]:
    """The last exchanges of this process in words, the oldest first."""
    return [
        f"{one.number}: {one.what}, begun {now - one.begun:.1f} s ago"
        + ("" if one.ended is None else f", ended after {one.ended - one.begun:.3f} s")
        for one in EXCHANGES.exchanges
    ]


def _lives(thread: threading.Thread) -> bool:
    with suppress(RuntimeError):  # of a thread that Python has not started, since 3.13
        return thread.is_alive()
    return False
