"""Times backward passes and exchanges, and lets all ranks find the same change in them.

[Note: The least of all ranks]
The rank that comes last to an exchange waits for no other. So the least time of all ranks is that
of computing and exchanging, whatever one rank did before: it validates, writes a checkpoint, or
reads its data late, and the others wait for it. What all ranks do between updates is not timed, but
for the wait of a forward for parameters, where each rank updates a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from slipstream.transport.consistency import collective_errors, maximum_later
from slipstream.tuner.change import Change, ChangeDetector

BLOCK = 16
"""Updates whose times are shared at once, 256 bytes a rank, beside the update that follows."""


class SpeedWatch:
    """Watches the speed of updates on all ranks.

    Args:
        group: of CPU tensors.
        waited_in_forward: seconds for which forward has waited for parameters, so far.

    Attributes:
        detector: judges the times; in the same state on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, waited_in_forward: Callable[[], float] = float
    ) -> None:
        self._group, self._waited_in_forward = group, waited_in_forward
        self._in_forward = 0.0  # until the last update
        self.detector = ChangeDetector()
        self._begun = self._ended = 0.0
        self._underway: tuple[torch.Tensor, dist.Work | None] | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the updates that are not shared yet."""
        self._seconds: list[float] = []
        self._waited: list[float] = []
        self._update, self._wait = 0.0, 0.0

    def backward_begins(self) -> None:
        """Begin to time a backward pass."""
        self._begun = perf_counter()

    def backward_ends(self) -> None:
        """Gradients of this rank are ready; exchanges may still run."""
        self._ended = perf_counter()

    def exchanged(self) -> None:
        """The exchanges are done."""
        now = perf_counter()
        self._update += now - self._begun
        self._wait += now - self._ended

    def updated(self) -> Change | None:
        """End an update; returns a change that is here for good, the same on all ranks.

        A collective every BLOCK updates, which the next call waits for.

        Raises:
            ExchangeError: another rank is gone.
        """
        change = self._arrived()
        in_forward = self._waited_in_forward()
        gathered = max(in_forward - self._in_forward, 0.0)  # less: the exchange is another one
        self._in_forward = in_forward
        self._seconds.append(self._update + gathered)
        self._waited.append(self._wait + gathered)
        self._update = self._wait = 0.0
        if change is not None:
            self.restart()
        elif len(self._seconds) == BLOCK:
            least = -torch.tensor([self._seconds, self._waited], dtype=torch.float64)
            with collective_errors("the comparison of the ranks' speed"):
                self._underway = least, maximum_later(least, self._group)
            self.restart()
        return change

    def _arrived(self) -> Change | None:
        if self._underway is None:
            return None
        (least, work), self._underway = self._underway, None
        if work is not None:
            with collective_errors("the comparison of the ranks' speed"):
                work.wait()
        seconds, waited = (-least).tolist()
        return self.detector.see(seconds, waited)
