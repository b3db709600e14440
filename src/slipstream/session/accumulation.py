"""An accumulation window: the backward passes that make one update, and the scale of their losses.

Never touches a gradient.
"""

from __future__ import annotations

import math

from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError


class Window:
    """Counts what goes into an update.

    Args:
        accumulate: backward passes an update.
        ranks: how many ranks average their gradients.
        loader: knows which of them have a batch of their own; None: all have.

    Attributes:
        contributions: micro-batches of all ranks so far.
        loss_scale: by what losses were multiplied.
    """

    def __init__(self, accumulate: int, ranks: int, loader: UnevenInputLoader | None) -> None:
        self._accumulate, self._ranks, self._loader = accumulate, ranks, loader
        self._done = 0  # backward passes, each with its step()
        self._counted = False  # whether this pass is among the contributions
        self.contributions = 0
        self.loss_scale = 1.0

    @property
    def last(self) -> bool:
        """Whether the update follows this backward pass."""
        return self._done == self._accumulate - 1

    @property
    def scale(self) -> float:
        """What makes a mean of the sum over ranks of gradients of ``loss / accumulate``."""
        return self._accumulate / self.contributions / self.loss_scale

    def count(self) -> bool:
        """A backward pass begins, maybe once more; whether this rank's batch is a filler."""
        loader = self._loader  # compared with None, for one without a length has no truth value
        if not self._counted:
            self.contributions += self._ranks if loader is None else loader.active
            self._counted = True
        return loader is not None and loader.dummy_batch

    def check_scale(self, loss_scale: float) -> None:
        """Take on a loss scale.

        Raises:
            UsageError: it is no finite number above 0, or not that of the window.
        """
        if not 0 < loss_scale < math.inf:
            raise UsageError(f"loss_scale is {loss_scale}; allowed: a finite number above 0")
        if (self._counted or self.contributions) and loss_scale != self.loss_scale:
            raise UsageError(
                f"loss_scale went from {self.loss_scale} to {loss_scale} although no update came "
                "between; gradients of both would be added up: change it after a step() that ended "
                "the accumulation window"
            )
        self.loss_scale = loss_scale

    def advance(self) -> bool:
        """The backward pass is over; whether the update is due."""
        self._counted = False
        self._done = (self._done + 1) % self._accumulate
        return not self._done

    def close(self) -> None:
        """The update is over."""
        self.contributions = 0
