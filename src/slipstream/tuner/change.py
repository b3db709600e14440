"""Tells a change for good from noise, in the seconds of updates.

Pure: ranks that show it the same seconds come to the same verdict at the same update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

CHANGE = 1.4
"""Times as long, or as short, as before: a change."""
BACK = 1.2
"""Times as long, or as short, as before: no change any more. Below CHANGE, so that seconds near
that do not begin and end a change again and again."""
CLEAR = 0.75
"""Part of the blocks of a change that are clearly slower or faster; no other one is as before."""
UPDATES, SECONDS = 64, 30.0
"""That a change must last, both of them; and that "before" is measured for."""
MOST_PATIENCE = 32
"""Times as many, at most."""
CALM = 10
"""Times what a change must last now: without one for so long, half of that is enough."""


class UpdateTimes(NamedTuple):
    """Quartiles of the seconds of some updates, and how long they waited at their ends.

    Example:
        >>> UpdateTimes.of([1.0, 2.0, 3.0, 4.0, 5.0], [0.5] * 5)
        UpdateTimes(low=2.0, middle=3.0, high=4.0, waited=0.5)
    """

    low: float
    middle: float
    high: float
    waited: float

    @classmethod
    def of(cls, seconds: Sequence[float], waited: Sequence[float]) -> UpdateTimes:
        """Summarize two updates or more."""
        low, middle, high = quantiles(seconds, n=4, method="inclusive")
        return cls(low, middle, high, median(waited))

    @classmethod
    def typical(cls, speeds: Sequence[UpdateTimes]) -> UpdateTimes:
        """The medians of several."""
        return cls(*map(median, zip(*speeds, strict=True)))

    def slower(self, before: UpdateTimes) -> bool:
        """Whether updates take clearly longer: the middle halves do not overlap."""
        return self.middle >= CHANGE * before.middle and self.low > before.high


class Change(NamedTuple):
    """A change for good.

    Attributes:
        before: of an update.
        after: of an update.
        updates: that it has lasted.
    """

    before: UpdateTimes
    after: UpdateTimes
    updates: int

    def __str__(self) -> str:
        """Say what changed, and where most of it is.

        Example:
            >>> before, after = UpdateTimes(0.4, 0.5, 0.6, 0.1), UpdateTimes(3.9, 4.0, 4.1, 3.5)
            >>> str(Change(before, after, 64)).rpartition(": ")[2]
            'the exchange has changed'
        """
        now, then = self.after, self.before
        most_behind = abs(now.waited - then.waited) * 2 >= abs(now.middle - then.middle)
        what = "the exchange has changed" if most_behind else "computing has changed"
        return (
            f"in {self.updates} updates backward and exchanges took {now.middle:.3f} s instead of "
            f"{then.middle:.3f} s, with a wait for exchanges of {now.waited:.3f} s instead of "
            f"{then.waited:.3f} s: {what}"
        )


class ChangeDetector:
    """Compares updates with those after the last change.

    The first updates are "before", as many as a change must last. A block of later ones that is
    clearly slower or faster begins a suspicion, one that is as before ends it, and a suspicion that
    has lasted as long again is a change: a burst, a pause or a rank that is slow for a moment is
    none. After each change the next one must last twice as long, so that a network that goes up
    and down costs ever less; after a calm time half as long again.

    Args:
        updates: that a change must last at least.
        seconds: that it must last, too.

    Attributes:
        before: updates after the last change; None: not measured yet.
        patience: times as long a change must last now.

    Source: hysteresis as in Schmitt's trigger; the doubling as in the damping of routes that flap,
    RFC 2439.

    Example:
        >>> detector = ChangeDetector()
        >>> blocks = [[1.0] * 16] * 4 + [[9.0] * 16] + [[1.0] * 16] * 4 + [[3.0] * 16] * 4
        >>> for block in blocks:
        ...     change = detector.see(block, block)
        >>> change.before.middle, change.after.middle, detector.patience
        (1.0, 3.0, 2)
    """

    def __init__(self, updates: int = UPDATES, seconds: float = SECONDS) -> None:
        self._least = updates, seconds
        self.before: UpdateTimes | None = None
        self.patience = 1
        self._faster = False  # where a change is suspected
        self._restart(None)

    def _restart(self, before: UpdateTimes | None) -> None:
        self.before = before
        self._calm = 0.0
        self._forget()

    def _forget(self) -> None:
        self._blocks: list[UpdateTimes] = []
        self._updates, self._seconds = 0, 0.0

    def see(self, seconds: Sequence[float], waited: Sequence[float]) -> Change | None:
        """Look at some more updates; returns the change that they confirm, and begins anew then.

        Args:
            seconds: of each update, in order.
            waited: the part of these after backward.
        """
        now = UpdateTimes.of(seconds, waited)
        if self.before is None:
            if self._lasted(now, seconds, 1):
                self._restart(UpdateTimes.typical(self._blocks))
            return None
        if self._blocks:
            if self._is_back(now):
                self._forget()
                return None
        elif not self._differs(now):
            self._rest(len(seconds), sum(seconds))
            return None
        else:
            self._faster = now.middle < self.before.middle
        if not self._lasted(now, seconds, self.patience):
            return None
        change = Change(self.before, UpdateTimes.typical(self._blocks), self._updates)
        if sum(map(self._differs, self._blocks)) < CLEAR * len(self._blocks):
            self._forget()
            return None
        self.patience = min(2 * self.patience, MOST_PATIENCE)
        self._restart(None)
        return change

    def _lasted(self, now: UpdateTimes, seconds: Sequence[float], times: int) -> bool:
        """Whether it has lasted, with this block, as many times as long as it must at least."""
        self._blocks.append(now)
        self._updates += len(seconds)
        self._seconds += sum(seconds)
        updates, least = self._least
        return self._updates >= times * updates and self._seconds >= times * least

    def _differs(self, now: UpdateTimes) -> bool:
        assert self.before is not None
        return now.slower(self.before) or self.before.slower(now)

    def _is_back(self, now: UpdateTimes) -> bool:
        assert self.before is not None
        if self._faster:
            return now.middle * BACK > self.before.middle
        return now.middle < BACK * self.before.middle

    def _rest(self, updates: int, seconds: float) -> None:
        """Become less patient where nothing has changed for long."""
        self._calm += min(updates / self._least[0], seconds / self._least[1])
        if self._calm >= CALM * self.patience:
            self.patience = max(self.patience // 2, 1)
            self._calm = 0.0

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on elsewhere needs to see a change."""
        before = None if self.before is None else list(self.before)
        return {"before": before, "patience": self.patience}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state`; None: begin anew."""
        state = state or {"before": None, "patience": 1}
        self.patience = min(max(state["patience"], 1), MOST_PATIENCE)
        self._restart(None if state["before"] is None else UpdateTimes(*state["before"]))
