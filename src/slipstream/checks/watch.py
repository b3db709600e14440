"""Whether a run hangs, from outside: the watch of one host, alone or with those of other hosts.

[Note: Who decides] The watch of host 0. All say at each beat what their ranks are doing; once no
rank shows a sign of life, it writes ``alarm``, all answer with the stacks of their ranks, and it
writes ``verdict``: an autopsy, or that it was none, as ranks that all sleep on purpose are in no
exchange. A watch that cannot reach the store for long decides from what it sees itself, which is
that host 0 is silent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from slipstream.checks.autopsy import Autopsy, RankState, ranks_named
from slipstream.checks.board import Board
from slipstream.checks.limits import STALE, STILL, interval_of
from slipstream.checks.watched_host import HostCases, HostState

PAUSE = 0.3
"""Share of the timeout from an alarm that was none to the next."""
ANSWER_SECONDS = 5.0
"""For the answers of all hosts to an alarm."""
HINT_SECONDS = 10.0
"""For all ranks of this host to start."""
LEAVE_SECONDS = 3.0
"""For other hosts to read the verdict, before the store ends with host 0."""


class Host(Protocol):
    """The ranks of a host."""

    def look(self, now: float, ended: bool = False) -> HostState: ...

    def cases(self, now: float) -> HostCases: ...

    def forget(self) -> None: ...


class Watch:
    """Watches the ranks of this host, and those of others through a board.

    Args:
        host: this one.
        timeout: seconds within which a run that hangs is found.
        board: what the hosts share; None: there is no other host.
        hosts: how many there are.
        host_rank: number of this one.

    Attributes:
        interval: seconds from one call of ``beat`` to the next.
    """

    def __init__(
        self,
        host: Host,
        timeout: float,
        board: Board | None = None,
        *,
        hosts: int = 1,
        host_rank: int = 0,
    ) -> None:
        self.interval = interval_of(timeout)
        self._host, self._timeout, self._board = host, timeout, board
        self._hosts, self._host_rank = hosts, host_rank
        self._left_beat = self._began = time.monotonic()
        self._all_since = self._began  # all ranks are seen, or will be
        self._not_before = 0.0  # of the next alarm
        self._alarm: tuple[str, float] | None = None  # its reason, and since when it is on
        self._alarms = 0  # that were none
        self._judged = -1  # the last alarm with a verdict
        self._state = HostState(host="")
        self._readers: set[int] = set()  # other hosts that answer, and would read a note
        self._hints: list[str] = []
        self._hinted: set[int] = set()

    def beat(self, now: float) -> Autopsy | None:
        """Look; an autopsy: the run hangs."""
        if now - self._left_beat > 3 * self.interval + 1:  # this process was stopped itself
            self._host.forget()
        self._state = self._host.look(now)
        self._hint(now)
        try:
            if self._board is None:
                return self._decide_alone({0: self._state}, {}, now)
            return self._beat_with_others(self._board, now)
        finally:
            self._left_beat = time.monotonic()

    def hints(self) -> list[str]:
        """Remarks to the user that are new."""
        hints, self._hints = self._hints, []
        return hints

    def leave(self, now: float) -> None:
        """Tell the others that the command of this host has ended."""
        if self._board is not None:
            self._board.post(self._beat_key(self._host_rank), _text(self._host.look(now, True)))
            self._board.flush()

    def close(self) -> None:
        """After a verdict: once the others that answer have it, too."""
        if self._board is None:
            return
        if self._host_rank == 0:
            until = time.monotonic() + LEAVE_SECONDS
            while not all(self._board.read(f"read/{other}") for other in self._readers):
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
        elif self._readers:
            self._board.post(f"read/{self._host_rank}", "")
            self._board.flush()
        self._board.close()

    # Alone.

    def _decide_alone(
        self, states: Mapping[int, HostState], gone: Mapping[int, HostState], now: float
    ) -> Autopsy | None:
        reason = self._hangs(states, gone, now)
        if reason is None:
            return None
        found = self._judge({self._host_rank: self._host.cases(now)}, states, gone, reason)
        if found is None:
            self._not_before = now + PAUSE * self._timeout
        return found

    def _hangs(
        self, states: Mapping[int, HostState], gone: Mapping[int, HostState], now: float
    ) -> str | None:
        """Why to look closer; None: there is nothing to see, or not enough.

        Args:
            states: of the hosts that answer.
            gone: last ones of those that do not.
        """
        known = [rank for state in (*states.values(), *gone.values()) for rank in state.ranks]
        living = [r for state in states.values() for r in state.ranks if not r.ended]
        size = max(state.world_size for state in (*states.values(), *gone.values()))
        stopped = gone or any(state.stopped for state in states.values())
        if not living or now < self._not_before or (len(known) < size and not stopped):
            return None
        least = min(rank.still for rank in living)
        if least < STILL * self._timeout:
            return None
        return f"no rank had shown a sign of life for {least:.0f} s"

    def _judge(
        self,
        answers: Mapping[int, HostCases],
        states: Mapping[int, HostState],
        gone: Mapping[int, HostState],
        reason: str,
    ) -> Autopsy | None:
        cases = {rank: case for said in answers.values() for rank, case in said.cases.items()}
        silent = {rank: state for said in answers.values() for rank, state in said.silent.items()}
        for host, state in {**states, **gone}.items():
            if host not in answers:
                silent |= {rank.rank: rank for rank in state.ranks if not rank.ended}
        found = [case.state for case in cases.values() if not case.state.ended]
        # what all sleep for on purpose, or a person looks at, or what has gone on meanwhile
        least = min((state.still for state in found), default=0.0)
        waits = any(state.waits for state in found) and not any(state.asking for state in found)
        if not waits or least < STILL * self._timeout / 2:
            return None
        size = max(state.world_size for state in (*states.values(), *gone.values()))
        return Autopsy.of(cases, silent, size, reason)

    # With others.

    def _beat_with_others(self, board: Board, now: float) -> Autopsy | None:
        board.post(self._beat_key(self._host_rank), _text(self._state))
        lead = self._hear(board, 0, now)
        reached = board.reached or self._began
        self._readers = {0}
        if self._host_rank != 0 and now - reached > STALE * self._timeout:
            self._readers = set()
            if lead is None or lead[0].ended:  # it was never there, or has left
                return self._decide_alone({self._host_rank: self._state}, {}, now)
            return self._decide_alone({self._host_rank: self._state}, {0: lead[0]}, now)
        said = board.read(self._key("alarm"))
        if self._host_rank == 0:
            self._lead(board, now)
        elif said is not None and self._alarm is None:
            self._answer(board, said[0], now)
        return self._verdict(board, now)

    def _lead(self, board: Board, now: float) -> None:
        heard = {other: self._hear(board, other, now) for other in range(1, self._hosts)}
        others = {other: said for other, said in heard.items() if said is not None}
        absent = sorted({*heard} - {*others})
        if absent and now - self._began > max(60.0, self._timeout):
            self._say_once(
                -3,
                f"has not heard the watches of hosts {', '.join(map(str, absent))} yet: until they "
                "come a hang is found only where a process is stopped",
            )
        limit = STALE * self._timeout
        answers = {h: s for h, (s, silence) in others.items() if silence < limit or s.ended}
        states = {0: self._state, **answers}
        gone = {h: s for h, (s, _) in others.items() if h not in answers}
        self._readers = {host for host, said in answers.items() if not said.ended}
        if self._alarm is None:
            reason = self._hangs(states, gone, now)
            if reason is not None:
                board.post(self._key("alarm"), reason)
                self._answer(board, reason, now)
            return
        if self._judged == self._alarms:
            return
        reason, since = self._alarm
        asked = [host for host, state in states.items() if not state.ended]
        notes = {host: board.read(self._key("case", host)) for host in asked}
        if None in notes.values() and now - since < ANSWER_SECONDS + 2 * self.interval:
            return
        cases = {h: HostCases.model_validate_json(n[0]) for h, n in notes.items() if n is not None}
        ended = {host: state for host, state in states.items() if state.ended}
        cases |= {host: HostCases.of_states(state.ranks) for host, state in ended.items()}
        found = self._judge(cases, states, gone, reason)
        self._judged = self._alarms
        board.post(self._key("verdict"), "" if found is None else _text(found))
        board.flush()

    def _answer(self, board: Board, reason: str, now: float) -> None:
        self._alarm = reason, now
        board.post(self._key("case", self._host_rank), _text(self._host.cases(now)))

    def _verdict(self, board: Board, now: float) -> Autopsy | None:
        said = board.read(self._key("verdict"))
        if said is None:
            return None
        if said[0]:
            return Autopsy.model_validate_json(said[0])
        self._alarms, self._alarm = self._alarms + 1, None
        self._not_before = now + PAUSE * self._timeout
        return None

    def _hear(self, board: Board, host: int, now: float) -> tuple[HostState, float] | None:
        """Read the last word of a host, and for how long nothing else."""
        said = board.read(self._beat_key(host))
        return said and (HostState.model_validate_json(said[0]), now - said[1])

    def _beat_key(self, host: int) -> str:
        return f"beat/{host}"

    def _key(self, what: str, host: int | None = None) -> str:
        return f"{what}/{self._alarms}" + ("" if host is None else f"/{host}")

    # What the user should know.

    def _hint(self, now: float) -> None:
        state = self._state
        if len(state.ranks) >= state.world_size or self._board is not None:
            self._all_since = now
        if state.ranks and now - self._all_since > HINT_SECONDS:
            self._say_once(
                state.world_size,
                f"sees {_named(state.ranks)} of {state.world_size}: other hosts are not seen, so "
                "that a hang is found only where a process here is stopped. Start a watch on each "
                "host, with --meet HOST:PORT --hosts N --host-rank R",
            )
        if not state.ranks and now - self._began > max(60.0, self._timeout):
            self._say_once(
                0,
                "has found no ranks: processes with the variables of torchrun, Open MPI or srun; "
                "those that a script starts itself (mp.spawn) are not seen",
            )
        if self._board is not None and self._board.refused:
            self._say_once(-2, f"is alone: {self._board.refused}")
        elif self._board is not None and self._board.reached is None and now - self._began > 60:
            self._say_once(-1, "has not reached the watch of host 0 yet")

    def _say_once(self, key: int, hint: str) -> None:
        if key not in self._hinted:
            self._hinted.add(key)
            self._hints.append(hint)


def _named(ranks: Sequence[RankState]) -> str:
    return ranks_named([rank.rank for rank in ranks])


def _text(said: HostState | HostCases | Autopsy) -> str:
    return said.model_dump_json(exclude_defaults=True)
