"""The first rounds of meetings that ``auto`` has chosen: a longer delay, where ranks wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch

from slipstream.codecs import Ranks
from slipstream.strategy import LocalConfig
from slipstream.strategy.local import ENOUGH, FRAGMENTS

NOTICED = 0.01
"""Part of its time that a rank may wait at any delay."""


class DelayTrial:
    """Measures round after round what meetings cost, until no longer delay would pay.

    The planner knows updates that exchange gradients. Those that do not are shorter, and hide less
    of an exchange. The first round does not count: codecs make their buffers.

    Every change carries the seconds of its rank, so ranks decide alike where they merge it, and
    nobody waits for a rank that has not come so far.

    Args:
        config: as chosen.
        islands: this one among all that meet.
        device: of the parameters.
        clock: updates by the schedule so far.
    """

    def __init__(
        self, config: LocalConfig, islands: Ranks, device: torch.device, clock: int = 0
    ) -> None:
        self._config, self._islands, self._device = config, islands, device
        gap, part = config.steps // config.fragments, config.steps // FRAGMENTS
        self._longest = max(min(gap, part), config.delay)
        self._left: float | None = None  # when the last update ended
        self._begin(clock)
        self._counts = False

    def _begin(self, clock: int) -> None:
        self._counts, self._first, self._told = True, clock, False
        self._met, self._alone, self._waits = 0.0, list[float](), list[float]()

    @property
    def over(self) -> bool:
        """Whether the delay is as long as it may be."""
        return self._config.delay >= self._longest

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Time all that a rank does for meetings where an update ends."""
        begun = self._now()
        if self._left is not None:
            self._alone.append(begun - self._left)
        yield
        self._left = self._now()
        self._met += self._left - begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the part of it that a rank waits for an exchange."""
        begun = self._now()
        yield
        self._waits.append(self._now() - begun)

    def _now(self) -> float:
        """The time at which the device has done what it was given."""
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        return perf_counter()

    def seconds(self, clock: int) -> torch.Tensor:
        """Seconds that a change carries which is sent after ``clock`` updates by the schedule: what
        this rank has waited for a fragment, spent at its meeting in all, and at an update
        alone; at its place among those of all islands."""
        seconds = torch.zeros(self._islands.count, 3, dtype=torch.float64, device=self._device)
        if self._waits and clock - self._first >= self._config.steps:
            self._told = True
            # an update that a script validates or saves behind is none of the usual ones
            fragments, alone = len(self._waits), median(self._alone)
            own = sum(self._waits) / fragments, self._met / fragments, alone
            seconds[self._islands.rank] = torch.tensor(own, dtype=torch.float64)
        return seconds.view(-1)

    def longer(self, clock: int, seconds: torch.Tensor) -> int | None:
        """The delay from now on, where a change has been merged; None: a round has not been
        measured yet. The trial is over where it is no longer than before.

        Args:
            clock: updates by the schedule.
            seconds: of all islands, as the change has brought them.
        """
        if not self._told:
            return None
        counted = self._counts
        self._begin(clock)
        if not counted:
            return None
        rows = seconds.view(-1, 3)
        # of the island that waits least: others wait for it, too
        waited, met, alone = rows[rows[:, 0].argmin()].tolist()
        delay, updates = self._config.delay, self._config.steps / self._config.fragments
        total = met + updates * alone
        if met > (1 - ENOUGH) * total and waited > NOTICED * total:
            delay = min(delay + math.ceil(waited / alone), self._longest)
        self._config = self._config.model_copy(update={"delay": delay})
        return delay
