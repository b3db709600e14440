"""A signal that any rank may get, and the update at which all ranks stop because of it.

The handler only notes the signal. About every second, at an update that all ranks know, they begin
to compare whether one has got it; the answer is taken an update later, so nobody waits for it.

Launchers signal a rank's whole process group, in which workers of its ``DataLoader`` are. Those
that are forked meanwhile have groups of their own: the rank needs their batches until it stops.
(Where it is killed, they end by themselves, within seconds, as torch's workers do.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from slipstream.errors import UsageError
from slipstream.strategy import Row
from slipstream.transport.consistency import collective_errors, maximum_later

SECONDS = 1.0
"""From one comparison to the next, about."""
LONGEST = 1000
"""Updates from one comparison to the next at most."""


class StopSignals:
    """Handlers of signals, from `install` to `close`; those of the script are called, too.

    Args:
        numbers: the signals.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._got = 0
        self._asked: tuple[torch.Tensor, dist.Work | None] | None = None
        self._left = 0  # updates until the next comparison
        self._interval, self._since = 1, 0.0

    @property
    def wanted(self) -> bool:
        """Whether there are signals to wait for."""
        return bool(self._numbers)

    def install(self, group: dist.ProcessGroup | None) -> None:
        """Note signals from now on.

        Args:
            group: all ranks, for CPU tensors, and for this alone; None: there is one.

        Raises:
            UsageError: this is not the main thread, which gets all signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "on_signal outside the main thread, which alone may handle signals; train in the "
                "main thread, or leave out on_signal"
            )
        self._group, self._left, self._interval = group, 0, 1
        self._got = 0
        self._since = time.monotonic()
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._note)
        if self._numbers:
            _installed.add(self)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._got = number
        before = self._before.get(number)
        if _is_of_the_script(before):
            before(number, frame)

    def due(self) -> int:
        """The signal for which all ranks stop after this update, 0: none; once an update, on all
        ranks.

        Raises:
            ExchangeError: another rank is gone.
        """
        if self._group is None:
            return self._got
        if self._asked is not None:
            found, work = self._asked
            self._asked = None
            with collective_errors("the comparison of signals"):
                if work is not None:
                    work.wait()
            if found[0]:
                return int(found[0])
            self._interval = -int(found[1])
            self._left = self._interval
        self._left -= 1
        if self._left <= 0:
            self._ask(self._group)
        return 0

    def _ask(self, group: dist.ProcessGroup) -> None:
        now = time.monotonic()
        update = (now - self._since) / self._interval
        self._since = now
        # the fastest rank must not wait longest: of all wishes the smallest counts
        wish = min(max(int(SECONDS / max(update, 1e-9)), 1), LONGEST)
        values = torch.tensor([self._got, -wish])
        with collective_errors("the comparison of signals"):
            self._asked = values, maximum_later(values, group)

    def forget(self) -> None:
        """The signal has stopped an update: it is done with."""
        self._got = 0

    def pass_on(self) -> None:
        """Let a signal that stopped no update do what it does without `install`, after `close`."""
        number, self._got = self._got, 0
        if number:
            signal.raise_signal(number)

    def report_rows(self) -> Sequence[Row]:
        """Nothing: the checkpoints have a row."""
        return ()

    def close(self) -> None:
        """Give the script its handlers back, after a comparison that is on its way."""
        if self._asked is not None and (work := self._asked[1]) is not None:
            work.wait()
        self.abandon()

    def abandon(self) -> None:
        """Do as `close`, after an error: other ranks may not answer."""
        self._asked = self._group = None
        _installed.discard(self)
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
            if number == self._got and _is_of_the_script(before):
                self._got = 0  # the script has heard of it
        self._before.clear()


_installed: WeakSet[StopSignals] = WeakSet()


def _leave_group() -> None:
    """Give the worker that a ``DataLoader`` has just forked a process group of its own."""
    frame: FrameType | None = sys._getframe() if _installed else None
    while frame is not None:
        made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(made, dataloader._BaseDataLoaderIter):  # torchdata's, too
            os.setpgid(0, 0)
            _installed.clear()  # what the worker forks itself is in its group
            return
        frame = frame.f_back


os.register_at_fork(after_in_child=_leave_group)


def _is_of_the_script(handler: Any) -> TypeGuard[Callable[[int, FrameType | None], Any]]:
    return callable(handler) and handler is not signal.default_int_handler
