"""Other ranks of a run, by what they say in its store, and whether the run hangs.

[Note: What is a hang]
Two things. A rank whose heartbeat stops: its process is stopped or gone, its host is down, or cut
off. Its neighbour, the rank before it, watches for that, so that looking costs each rank the same
on any number of them. Or: some ranks wait for others, and no rank at all shows a sign of life,
which is computing, moving bytes, or moving on in its script (``vitals``, ``stacks``). So a rank
that evaluates or saves for an hour is none, and one that sleeps is. A debugger is none either.
"""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

from slipstream.checks.alarm import AlarmKind
from slipstream.checks.autopsy import RankState, ranks_named
from slipstream.checks.limits import STALE, STILL
from slipstream.checks.own_view import OwnView
from slipstream.checks.vitals import state as state_of_process

FIRST_FACTOR = 10
"""Times as long is allowed until a session has made its first updates."""
WATCHERS = 3
"""Ranks, from 0, that look at all others once they are still."""


class OtherRanks:
    """Reads what ranks have said last, and knows for how long nothing else.

    Args:
        store: has the beats of all ranks.
        rank: of this process.
        world_size: number of ranks.
        timeout: seconds within which a run that hangs ends.
        own: this rank, as it sees itself.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: float, own: OwnView
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout, self._own = timeout, own
        self._heard: dict[int, tuple[bytes, float]] = {}  # what a rank said, and since when

    def forget(self) -> None:
        """Let silence count anew."""
        self._heard.clear()

    def hear(self, rank: int, now: float) -> tuple[RankState, float] | None:
        """Read what a rank has said last, and for how long nothing else; None: nothing yet."""
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return None
        said = self._store.get(key)
        before = self._heard.get(rank)
        if before is None or before[0] != said:
            self._heard[rank] = said, now
        return RankState.model_validate_json(said), now - self._heard[rank][1]

    def last_words(self) -> dict[int, RankState]:
        """The last words of others, as far as this rank has heard them, by rank."""
        heard = sorted(self._heard.items())
        return {rank: RankState.model_validate_json(said) for rank, (said, _) in heard if said}

    def with_all(self, own: RankState, now: float) -> list[RankState]:
        """The states of all ranks, with this one's ``own``; none, where one has said nothing."""
        others = (rank for rank in range(self._world_size) if rank != self._rank)
        heard = [self.hear(rank, now) for rank in others]
        return [] if None in heard else [own, *(state for state, _ in filter(None, heard))]

    def silent(self, now: float) -> str | None:
        """Say that the next rank that has not left is silent; None: it is not."""
        for distance in range(1, self._world_size):
            rank = (self._rank + distance) % self._world_size
            heard = self.hear(rank, now)
            other, silence = heard or (None, now - self._heard.setdefault(rank, (b"", now))[1])
            if other is not None and other.ended:
                continue
            if silence > self._timeout * STALE and not self._lives(other, silence):
                return f"rank {rank} was silent for {silence:.0f} s"
            break
        return None

    def _lives(self, other: RankState | None, silence: float) -> bool:
        """Whether a silent rank computes, as a call of C may keep its thread waiting; of another
        host: whether it may do so for long, as it has hardly begun."""
        if other is None or silence > FIRST_FACTOR * self._timeout:
            return False
        return state_of_process(other.pid) == "R" if self._own.sees(other) else other.young

    def this_rank_looks(self, now: float) -> bool:
        """Whether this rank looks at all others: the first ones do, or all, if these have left."""
        first = range(min(WATCHERS, self._world_size))
        if self._rank in first:
            return True
        heard = [self.hear(rank, now) for rank in first]
        return all(said is not None and said[0].ended for said in heard)

    def hang(self, own: RankState, now: float) -> tuple[AlarmKind, str] | None:
        """Say that ranks wait and none shows a sign of life; None: it is not so."""
        states = self.with_all(own, now)
        if not any(state.waits for state in states) or any(state.asking for state in states):
            return None
        if left := [state.rank for state in states if state.ended]:
            # not in an exchange of the script, which they may yet join
            waits = own.waits and own.verb
            return ("left", f"rank {own.rank} waited for {ranks_named(left)}") if waits else None
        least = min(state.still for state in states)
        allowed = self._timeout * STILL * (FIRST_FACTOR if any(s.young for s in states) else 1)
        if least > allowed:
            return "still", f"no rank had shown a sign of life for {least:.0f} s"
        return None
