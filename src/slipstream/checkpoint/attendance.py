"""Whether all ranks still save together, where each may end its loop when it likes.

Under ``local.stretch`` a rank that closes may end a meeting there, which another rank ends in its
loop, and would save after: it must not wait for the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slipstream.strategy import Row
from slipstream.transport.consistency import any_of, collective_errors, maximum_later


class Attendance:
    """Ranks that call ``Checkpoints.step``, from `begin` until one of them closes."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._over = False

    def begin(self, group: dist.ProcessGroup | None) -> None:
        """Ask from now on.

        Args:
            group: all ranks, for CPU tensors, and for this alone; None: there is one.
        """
        self._group = group

    def complete(self) -> bool:
        """Whether all ranks are here, the same on all of them; waits for those that are coming.

        Raises:
            ExchangeError: another rank is gone.
        """
        if self._group is not None and not self._over:
            self._over = any_of(False, self._group)
        return not self._over

    def report_rows(self) -> Sequence[Row]:
        """Nothing: the checkpoints have a row."""
        return ()

    def close(self) -> None:
        """Answer for good that this rank does not come. Waits for nobody: another rank may need
        this one at a meeting before it asks."""
        if self._group is not None and not self._over:
            with collective_errors("the end of a loop"):
                maximum_later(torch.ones(1, dtype=torch.uint8), self._group)
        self._group = None

    def abandon(self) -> None:
        """Do as `close`, after an error: other ranks may not answer."""
        self._group = None
