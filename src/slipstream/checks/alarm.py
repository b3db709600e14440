"""Alarms in the store of a run: one rank asks, all say where they are, and the one judges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch.distributed.distributed_c10d import Store

from slipstream.checks.autopsy import RankCase, RankState
from slipstream.checks.limits import STILL
from slipstream.strategy.setting import FrozenModel

AlarmKind = Literal["silent", "still", "left", "failed"]
"""Why a rank asks: another is silent, or has left; all are still; an exchange has failed."""


class Alarm(FrozenModel):
    """The question of a rank."""

    rank: int
    kind: AlarmKind
    reason: str

    def was_none(
        self,
        cases: Mapping[int, RankCase],
        silent: Mapping[int, RankState | None],
        timeout: float,
    ) -> bool:
        """Tell whether nothing hangs: machines may give threads no core for seconds.

        Args:
            cases: of the ranks that answered, or have left.
            silent: the others.
            timeout: seconds within which a run that hangs ends.
        """
        if self.kind == "silent":
            live = {rank for case in cases.values() for rank in case.computing}
            return {*silent} <= live
        least = min((case.state.still for case in cases.values()), default=0.0)
        return self.kind == "still" and not silent and least < timeout * STILL / 2


class AlarmVerdict(FrozenModel):
    """The answer to an alarm."""

    words: str = ""
    """Whom to blame, and why; empty: it was no hang."""
    first: tuple[int, ...] | None = ()
    """Ranks that end at once; None: each as its exchange fails."""


class Alarms:
    """The alarms of a session, one after another; only those go on that were none.

    Args:
        store: the same for all ranks.

    Attributes:
        number: of the alarm that comes next, or is on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.number = 0

    def ask(self, alarm: Alarm) -> bool:
        """Raise an alarm, unless one is on; whether the one that is on is this rank's."""
        said = self._store.compare_set(self._key("alarm"), "", alarm.model_dump_json())
        return Alarm.model_validate_json(said).rank == alarm.rank

    def asked(self) -> Alarm | None:
        """Read the alarm that is on; None: there is none."""
        key = self._key("alarm")
        if not self._store.check([key]):
            return None
        return Alarm.model_validate_json(self._store.get(key))

    def tell(self, case: RankCase) -> None:
        """Answer the alarm."""
        self._store.set(self._key("case", case.state.rank), case.model_dump_json())

    def told(self, ranks: Iterable[int]) -> list[int]:
        """List which of some ranks have answered."""
        return [rank for rank in ranks if self._store.check([self._key("case", rank)])]

    def cases(self, ranks: Iterable[int]) -> dict[int, RankCase]:
        """Read the answers of ranks that have `told`."""
        read = self._store.get
        return {r: RankCase.model_validate_json(read(self._key("case", r))) for r in ranks}

    def judge(self, verdict: AlarmVerdict) -> None:
        """Say how the alarm ends."""
        self._store.set(self._key("verdict"), verdict.model_dump_json())

    def verdict(self) -> AlarmVerdict | None:
        """Read how the alarm ends; None: that is not known yet."""
        key = self._key("verdict")
        if not self._store.check([key]):
            return None
        return AlarmVerdict.model_validate_json(self._store.get(key))

    def next(self) -> None:
        """Go on, as this one was none."""
        self.number += 1

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{what}/{self.number}" + ("" if rank is None else f"/{rank}")
