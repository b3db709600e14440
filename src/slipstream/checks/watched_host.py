"""The ranks of a host, seen from outside of their processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from slipstream.checks.autopsy import RankCase, RankState
from slipstream.checks.dumps import Dump, Dumps
from slipstream.checks.processes import RankProcess, ranks_below, uses_device
from slipstream.checks.vitals import STATES, Vitals, in_words, state, unsent, vitals
from slipstream.strategy.setting import FrozenModel

_SILENT = ("T", "t", "Z")
"""States of processes that write no stacks."""


class HostState(FrozenModel):
    """The ranks of a host at one look."""

    host: str
    beat: int = 0
    world_size: int = 0
    ranks: tuple[RankState, ...] = ()
    stopped: dict[int, str] = Field(default_factory=dict)
    """Ranks whose processes are stopped or dead, with the state of these in words."""
    ended: bool = False
    """Whether the command of this host has ended."""


class HostCases(FrozenModel):
    """The views of a host's ranks once something is wrong."""

    cases: dict[int, RankCase] = Field(default_factory=dict)
    silent: dict[int, RankState] = Field(default_factory=dict)

    @classmethod
    def of_states(cls, states: Iterable[RankState]) -> HostCases:
        """Collect the last words of a host whose ranks have ended."""
        return cls(cases={state.rank: RankCase(state=state) for state in states})


@dataclass(slots=True)
class _Watched:
    process: RankProcess
    vitals: Vitals
    alive: float
    dump: Dump | None = None
    dumped: float = 0.0
    ended: bool = False


class WatchedHost:
    """Looks at the ranks below a process.

    Args:
        root: whose descendants they are.
        host: the name of this one.
        dumps: get the stacks of the ranks.
        interval: seconds between looks at the stack of a rank that computes on a device.
    """

    def __init__(self, root: int, host: str, dumps: Dumps, interval: float) -> None:
        self.host = host
        self._root, self._dumps, self._interval = root, dumps, interval
        self._ranks: dict[int, _Watched] = {}
        self._beat = self._world_size = 0

    @property
    def living(self) -> dict[int, int]:
        """The processes of the ranks that lived at the last look."""
        return {rank: w.process.pid for rank, w in self._ranks.items() if not w.ended}

    def forget(self) -> None:
        """Count the seconds without a sign of life from the next look on."""
        self._ranks.clear()

    def look(self, now: float, ended: bool = False) -> HostState:
        """At all ranks; ``ended``: once the command has."""
        found = ranks_below(self._root, self._dumps.knows)
        for rank, process in found.items():
            self._world_size = process.environment.world_size
            known = self._ranks.get(rank)
            if known is None or known.process.pid != process.pid:
                signs = vitals(process.pid)
                self._ranks[rank] = _Watched(process, signs, now)
        for rank, watched in self._ranks.items():
            watched.ended = rank not in found
        for rank in [r for r in self._ranks if r >= self._world_size]:  # of fewer ranks than before
            del self._ranks[rank]
        self._look_at((w for w in self._ranks.values() if not w.ended), now)
        self._beat += 1
        letters = {r: state(w.process.pid) for r, w in self._ranks.items()}
        return HostState(
            host=self.host,
            beat=self._beat,
            world_size=self._world_size,
            ranks=tuple(self._state(rank, now) for rank in sorted(self._ranks)),
            stopped={
                r: f"its process is {STATES[letter]}"
                for r, letter in letters.items()
                if letter in _SILENT and not self._ranks[r].ended
            },
            ended=ended,
        )

    def cases(self, now: float) -> HostCases:
        """Collect all that can be known now; takes seconds."""
        living = {r: w for r, w in self._ranks.items() if not w.ended}
        silent = {
            rank: in_words(watched.process.pid)
            for rank, watched in living.items()
            if state(watched.process.pid) in (*_SILENT, None)
        }
        asked = [w.process.pid for r, w in living.items() if r not in silent]
        dumps, collectives = self._dumps.of(asked), self._dumps.collectives(asked)
        cases, sent = {}, unsent()
        for rank, watched in self._ranks.items():
            if rank in silent:
                continue
            dump = dumps.get(watched.process.pid, Dump())
            cases[rank] = RankCase(
                state=self._state(rank, now, dump),
                stacks=dump.stacks,
                collectives=collectives.get(watched.process.pid, ()),
                unsent=sent,
                neighbours=silent,
            )
        return HostCases(cases=cases, silent={rank: self._state(rank, now) for rank in silent})

    def _look_at(self, ranks: Iterable[_Watched], now: float) -> None:
        asked = []
        for watched in ranks:
            pid = watched.process.pid
            if state(pid) in _SILENT:  # its children may go on for a while
                continue
            signs, still = vitals(pid), now - watched.alive
            spins = uses_device(pid)
            if signs.show_life_since(watched.vitals, still, computing=not spins):
                watched.alive, watched.vitals = now, signs
            elif spins and still > self._interval and now - watched.dumped > self._interval:
                asked.append(watched)
        dumps = self._dumps.of([w.process.pid for w in asked])
        for watched in asked:
            dump = dumps.get(watched.process.pid)
            if dump and watched.dump and dump.key != watched.dump.key:
                watched.alive = now
            watched.dump, watched.dumped = dump or watched.dump, now

    def _state(self, rank: int, now: float, dump: Dump | None = None) -> RankState:
        watched = self._ranks[rank]
        dump = dump or watched.dump or Dump()
        place = dump.place
        return RankState(
            rank=rank,
            host=self.host,
            pid=watched.process.pid,
            step=None,
            line=place.line,
            exchange="" if place.asking else dump.exchange,
            loading=place.loading,
            asking=place.asking,
            still=round(now - watched.alive, 1),
            ended="ended its process" if watched.ended else "",
        )
