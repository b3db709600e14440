"""Which rank of a host ended first, and how, to the millisecond.

Once a rank is gone, its peers fail within tenths of a second, each with an error of its own, and a
launcher that looks ten times a second may take any of them for the first one. The kernel knows
better: the descriptor of a process (``pidfd``) becomes readable at the moment at which it ends.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from slipstream.checks.autopsy import ranks_named
from slipstream.checks.vitals import PROC

CERTAIN_SECONDS = 0.02
"""Between two ends of which one was surely first: a thread may get its core that late."""
_STATE, _EXIT_CODE = 0, 49
"""Fields of ``/proc/PID/stat`` after the name of the process."""
_SENT = "by SIGTERM"
"""Not the process's own doing."""


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank: ``how`` is ``with code 1``, ``by SIGKILL``, or unknown and empty."""

    rank: int
    when: float
    how: str


class RankEnds:
    """Notes the ends of processes that are ranks, in a thread of its own.

    Args:
        host: the name of this one.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._epoll = select.epoll()
        self._followed: dict[int, tuple[int, int]] = {}  # by descriptor: rank and process
        self._pids: dict[int, int] = {}
        self._ends: dict[int, RankEnd] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._note, name="slipstream-ends", daemon=True).start()

    def follow(self, pids: Mapping[int, int]) -> None:
        """Wait for the ends of these processes, too.

        Args:
            pids: by rank; another process of a known rank: a launcher has started all anew.
        """
        with self._lock:
            if any(self._pids.get(rank, pid) != pid for rank, pid in pids.items()):
                self._pids, self._ends = {}, {}
            for rank, pid in pids.items():
                if rank in self._pids:
                    continue
                with suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    self._pids[rank], self._followed[descriptor] = pid, (rank, pid)
                    self._epoll.register(descriptor, select.EPOLLIN)

    @property
    def ends(self) -> list[RankEnd]:
        """The ends so far, in order."""
        with self._lock:
            return sorted(self._ends.values(), key=lambda end: end.when)

    @property
    def words(self) -> str:
        """Who ended first; empty: nobody ended, all are done, or of one alone not even how it ended
        is known.

        Example:
            >>> ends = RankEnds("node0")
            >>> ends._ends = {0: RankEnd(0, 7.5, "with code 1"), 1: RankEnd(1, 7.1, "by SIGKILL")}
            >>> ends.words
            'rank 1 (host node0) ended first, by SIGKILL; rank 0 0.40 s later'
        """
        ends = self.ends
        if not ends or all(end.how == "with code 0" for end in ends):
            return ""
        if [end.how for end in ends] == [""]:  # its launcher was faster, and may have ended it
            return ""
        first, *later = ends
        near = [end for end in later if end.when - first.when < CERTAIN_SECONDS]
        if all(end.how == _SENT for end in (first, *near)):
            ranks = ranks_named(sorted(end.rank for end in (first, *near)))
            return (
                f"SIGTERM ended {ranks} (host {self._host}) first: its sender, a launcher, a "
                "scheduler or a person, may know why"
            )
        if near:
            each = ", ".join(_told(end) for end in (first, *near))
            ranks = ranks_named(sorted(end.rank for end in (first, *near)))
            apart = 1e3 * (near[-1].when - first.when)
            return (
                f"{ranks} (host {self._host}) ended within {apart:.0f} ms of each other, so that "
                f"it is uncertain which was first: {each}"
            )
        how = f", {first.how}" if first.how else ""
        after = [f"rank {e.rank} {e.when - first.when:.2f} s later" for e in later]
        return "; ".join([f"rank {first.rank} (host {self._host}) ended first{how}", *after])

    def _note(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                when = time.monotonic()
                with self._lock:
                    rank, pid = self._followed.pop(descriptor)
                    if self._pids.get(rank) == pid:
                        self._ends[rank] = RankEnd(rank, when, how_it_ended(pid))
                self._epoll.unregister(descriptor)
                os.close(descriptor)


def how_it_ended(pid: int) -> str:
    """The code or the signal of a process, which are known until its parent takes note of its end;
    then nothing."""
    with suppress(OSError, ValueError, IndexError):
        fields = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[_STATE] == "Z":
            code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
            return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    return ""


def _told(end: RankEnd) -> str:
    return f"rank {end.rank} {end.how}".strip()
