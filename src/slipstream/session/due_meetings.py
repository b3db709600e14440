"""Updates that have ended, and of which the meetings of ``local`` are still to be told."""

from __future__ import annotations

import time

import torch

from slipstream.checks.own_view import UpdateCount
from slipstream.local.training import LocalTraining


class DueMeetings:
    """Lets meetings wait while a graph waits for its backward: its parameters must stay.

    One does where a script has skipped an update, which shows when it calls backward again; or, by
    zeroed gradients, while it evaluates.

    Args:
        local: holds the meetings; None: there are none.
        progress: counts the time that this rank waits in them.
    """

    def __init__(self, local: LocalTraining | None, progress: UpdateCount) -> None:
        self._local, self._progress = local, progress
        self._worked: list[bool] = []  # by update: whether this rank has changed its parameters

    def __len__(self) -> int:
        """Count the updates of which no meeting was told."""
        return len(self._worked)

    def add(self, worked: bool) -> None:
        """An update has ended; ``worked``: this rank has changed its parameters in it."""
        if self._local is not None:
            self._worked.append(worked)

    def hold(self) -> None:
        """Tell the meetings of all updates that have ended: no graph is waiting."""
        while self._local is not None and self._worked and not self._local.evaluates:
            began = time.perf_counter()
            with torch.inference_mode(False):  # that of an evaluation: what is made here stays
                self._local.updated(self._worked.pop(0))
            self._progress.waited += time.perf_counter() - began

    def send_ahead(self) -> None:
        """Let meetings send what changes no parameters here: a graph is waiting."""
        if self._local is not None and self._worked and not self._local.evaluates:
            with torch.inference_mode(False):  # as in `hold`
                self._local.send_ahead(self._worked[0])
