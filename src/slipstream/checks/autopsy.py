"""The autopsy of a run that hangs: what each rank was doing, and whom the others wait for.

Values in, values out; nothing here communicates. [Note: Who is to blame] in the order of certainty:

1. ranks that give no sign of life;
2. ranks that have ended, or left their loop, while others wait for them;
3. ranks that wait for something else than the others do: data, a lock, a sleep;
4. ranks in another exchange than most, or that give another one to it: the fewest; where no
   exchange has more ranks than another, all;
5. nobody: all are in the same exchange, and nothing arrives, so it is the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from slipstream.checks.flight_record import RecordedCollective, earliest_apart
from slipstream.errors import TraceError
from slipstream.strategy.setting import FrozenModel

M = TypeVar("M", bound=FrozenModel)

VERSION = 1
LATER = 60.0
"""Seconds behind an autopsy after which what a rank notes is of another run."""
NAMES_SHOWN = 3
LEFT = "left its loop"
"""What a rank has done that closes its session where others train on."""
_OR_NONE = "leave a batch out on all ranks or on none"
_AS_OFTEN = (
    f"; all ranks must call backward() as often: {_OR_NONE}, and pass the loader to accelerate(), "
    "which evens out their lengths"
)
_LEFT_OUT = f"; if its data is not late, it has left out a batch that others trained on: {_OR_NONE}"


class RankState(FrozenModel):
    """The place of a rank; a few hundred bytes, written at each beat."""

    rank: int
    host: str
    pid: int
    processes: str = ""
    """Those among which it has this number; empty: unknown."""
    step: int | None
    """Updates that are done; None: nobody counts them."""
    young: bool = False
    """Whether this session has hardly updated yet: it compiles, and reads for the first time."""
    line: str = ""
    """Of the script."""
    verb: str = ""
    """Of the session, called and not returned."""
    exchange: str = ""
    """The oldest exchange that is under way, or ``an exchange of the script``."""
    names: tuple[str, ...] = ()
    """The gradients in it."""
    number: int = 0
    """Exchanges begun so far."""
    seconds: float = 0.0
    """That it takes for an update of its own, waiting left out; 0: unknown."""
    loading: bool = False
    """Whether it waits for data."""
    asking: bool = False
    """Whether a debugger waits for a person."""
    still: float = 0.0
    """Seconds without a sign of life in its own work."""
    ended: str = ""
    """Why it has left; empty: it has not."""
    thread: str = "MainThread"
    """That trains."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.exchange) and not self.ended


class RankCase(FrozenModel):
    """A rank's own view once something is wrong."""

    state: RankState
    stacks: dict[str, list[str]] = Field(default_factory=dict)
    exchanges: list[str] = Field(default_factory=list)
    """The last ones, oldest first."""
    collectives: tuple[RecordedCollective, ...] = ()
    """Likewise, of a script that does not know slipstream, where torch has a record of them."""
    unsent: list[str] = Field(default_factory=list)
    """Addresses that do not confirm what this host sends."""
    neighbours: dict[int, str] = Field(default_factory=dict)
    """Ranks whose processes it sees: the state of each, where it gives no answer."""
    computing: tuple[int, ...] = ()
    """Those of them whose processes compute: a call of C may keep their heartbeat waiting."""


class Autopsy(FrozenModel):
    """Why a run hung."""

    version: int = VERSION
    world_size: int
    verdict: str
    blamed: tuple[int, ...]
    reason: str
    """Why somebody looked: how long it had waited, or what had failed."""
    cases: dict[int, RankCase]
    """By rank; silent ranks have their last state alone."""

    @classmethod
    def of(
        cls,
        cases: Mapping[int, RankCase],
        silent: Mapping[int, RankState | None],
        world_size: int,
        reason: str,
    ) -> Autopsy:
        """Find whom the others wait for.

        Args:
            cases: of the ranks that answered.
            silent: those that did not, with what they had said last.
            world_size: number of ranks.
            reason: why somebody looked.
        """
        blamed, verdict = _verdict(cases, silent)
        last = {rank: RankCase(state=said) for rank, said in silent.items() if said is not None}
        return cls(
            world_size=world_size,
            verdict=verdict,
            blamed=tuple(blamed),
            reason=reason,
            cases={**last, **cases},
        )

    @classmethod
    def read(cls, folder: Path) -> Autopsy:
        """Read the autopsy of a run; of one that was killed before it had a verdict, that of what
        its ranks have left.

        Raises:
            TraceError: there is none, or what is there is none.
        """
        whole = folder / "autopsy.json" if folder.is_dir() else folder
        notes = sorted(folder.glob("rank*.json"))
        if whole.is_file():
            end = whole.stat().st_mtime + LATER
            notes = [note for note in notes if note.stat().st_mtime > end]
            if not notes:
                return _read(cls, whole)
        cases = [_read(RankCase, path) for path in notes]
        if not cases:
            raise TraceError(
                f"{folder} has no autopsy; pass the folder that the error named (checks.folder, "
                "slipstream-autopsy by default)"
            )
        by_rank = {case.state.rank: case for case in cases}
        size = max(by_rank) + 1
        silent = dict.fromkeys(range(size) - by_rank.keys())
        return cls.of(by_rank, silent, size, "the run was ended from outside")


def by_stack(cases: Iterable[RankCase]) -> list[tuple[list[int], list[str]]]:
    """Ranks whose threads that train are at the same place, the fewest first, with their stack."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for case in cases:
        groups[tuple(case.stacks.get(case.state.thread, ()))].append(case.state.rank)
    return [(ranks, list(stack)) for stack, ranks in sorted(groups.items(), key=_size)]


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 2 and 5``, ``ranks 1, 2, 3 and 9 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, rest = list(map(str, ranks[:4])), len(ranks) - 4
    if rest > 0:
        return f"ranks {', '.join(shown)} and {rest} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _size(group: tuple[tuple[str, ...], list[int]]) -> int:
    return len(group[1])


def _read(kind: type[M], path: Path) -> M:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"is no autopsy: {where and f'{where}: '}{first['msg']}"
    raise TraceError(f"{path} {problem}. Give the folder that the error named (checks.folder).")


def _verdict(
    cases: Mapping[int, RankCase], silent: Mapping[int, RankState | None]
) -> tuple[list[int], str]:
    states = {rank: case.state for rank, case in cases.items()}
    waiting = [rank for rank, state in states.items() if state.waits]
    if gone := sorted(silent):
        return gone, f"{_silence(gone, silent, cases)}{_others_wait(waiting, states)}"
    if left := sorted(rank for rank, state in states.items() if state.ended):
        first = states[left[0]]
        words = f"{_at(first)} has {first.ended}{_after(first)}"
        if len(left) > 1:
            words += f", as {ranks_named(left[1:])} did"
        fewer = _AS_OFTEN if first.ended == LEFT and first.step is not None else ""
        return left, f"{words}{_others_wait(waiting, states)}{fewer}"
    if apart := sorted(rank for rank, state in states.items() if not state.waits):
        # whoever has not yet come where the others are
        first = max((states[rank] for rank in apart), key=lambda state: state.still)
        blamed = [rank for rank in apart if _place(states[rank]) == _place(first)]
        words = f"{_at(first)} never entered {_awaited(waiting, states)}: it {_doing(first)}"
        fewer = _LEFT_OUT if first.loading and any(states[r].names for r in waiting) else ""
        return blamed, f"{words}{fewer}"
    groups: dict[str, list[int]] = defaultdict(list)
    for what, ranks in earliest_apart({r: case.collectives for r, case in cases.items()}).items():
        groups[what] = ranks
        states |= {rank: states[rank].model_copy(update={"exchange": what}) for rank in ranks}
    for rank, state in sorted(states.items()) if not groups else ():
        groups[_meeting_place(state)].append(rank)
    if len(groups) > 1:
        (_, few), *_, (_, many) = by_size = sorted(groups.items(), key=lambda group: len(group[1]))
        some_are_few = len(few) < len(many)
        places = [few, many] if some_are_few else [ranks for _, ranks in by_size]
        verbs = {states[ranks[0]].verb for ranks in places}
        fewer = _AS_OFTEN if "backward" in verbs and len(verbs) > 1 and all(verbs) else ""
        words = f"{_told_apart(places, states)}: they will never meet{fewer}"
        return (few if some_are_few else sorted(states)), words
    unsent = {address for case in cases.values() for address in case.unsent}
    where = f"; what is sent to {', '.join(sorted(unsent))} is not confirmed" if unsent else ""
    some = next(iter(states.values()))
    return [], (
        f"all ranks are in {_exchange(some)}{_of_update(some)}, and nothing arrives: the "
        f"network between them is cut, or far slower than before{where}"
    )


def _silence(
    gone: Sequence[int],
    silent: Mapping[int, RankState | None],
    cases: Mapping[int, RankCase],
) -> str:
    first = silent[gone[0]]
    seen = [case.neighbours[gone[0]] for case in cases.values() if gone[0] in case.neighbours]
    why = seen[0] if seen else "its process is stopped or gone, its host down, or its link cut"
    name = f"rank {gone[0]}" if first is None else _at(first)
    also = f" (as are {ranks_named(gone[1:])})" if len(gone) > 1 else ""
    last = "" if first is None else _last_seen(first)
    return f"{name} is silent{also}: {why}{last}"


def _last_seen(state: RankState) -> str:
    if state.step is None:
        return f"; it was last seen {_where(state)}" if state.line else ""
    return f"; it was last seen after update {state.step}, {_where(state)}"


def _others_wait(waiting: Sequence[int], states: Mapping[int, RankState]) -> str:
    wait = "waits" if len(waiting) == 1 else "wait"
    return f"; {ranks_named(waiting)} {wait} in {_awaited(waiting, states)}" if waiting else ""


def _awaited(waiting: Sequence[int], states: Mapping[int, RankState]) -> str:
    if not waiting:
        return "the exchange"
    state = states[waiting[0]]
    return f"{_exchange(state)}{_of_update(state)}"


def _told_apart(places: Sequence[Sequence[int]], states: Mapping[int, RankState]) -> str:
    """Ranks in exchanges that are not the same: of the first ones only one, with its host."""
    first, *others = [(ranks, states[ranks[0]]) for ranks in places[:NAMES_SHOWN]]
    return ", ".join(
        [
            f"{_at(first[1])} is in {_exchange(first[1])} ({_doing(first[1])})",
            *(f"{ranks_named(r)} in {_exchange(one)} ({_doing(one)})" for r, one in others),
        ]
    )


def _exchange(state: RankState) -> str:
    names = ", ".join(state.names[:NAMES_SHOWN])
    more = ", ..." if len(state.names) > NAMES_SHOWN else ""
    return f"{state.exchange} ({names}{more})" if names else state.exchange


def _doing(state: RankState) -> str:
    what = " for data" if state.loading else ""
    still = f", for {state.still:.0f} s" if state.still >= 1 else ""
    return f"waits{what} {_where(state)}{still}"


def _where(state: RankState) -> str:
    verb = f" (session.{state.verb})" if state.verb else ""
    return f"in {state.line}{verb}" if state.line else f"outside of its script{verb}"


def _place(state: RankState) -> tuple[str, str]:
    return state.line, state.verb


def _meeting_place(state: RankState) -> str:
    own = f"{state.exchange} at {state.line}"
    return f"{state.exchange} {state.step}" if state.names else own


def _at(state: RankState) -> str:
    return f"rank {state.rank} (host {state.host})"


def _of_update(state: RankState) -> str:
    return "" if state.step is None else f" of update {state.step + 1}"


def _after(state: RankState) -> str:
    if state.step is None:
        return ""
    return f" after {state.step} update{'s' if state.step != 1 else ''}"
