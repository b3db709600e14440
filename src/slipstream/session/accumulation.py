"""An accumulation window: the backward passes that make up an update, and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.data.balance import SampleBalance
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError


class AccumulationWindow:
    """Counts the micro-batches of an update.

    Args:
        accumulate: backward passes an update.
        ranks: how many ranks average their gradients.
        loader: knows how many of them have a batch in this step; None: all have.
        balance: knows what a batch of this rank counts; None: all count alike.

    Attributes:
        accumulate: as given.
        contributions: micro-batches of all ranks so far, dummy batches not counted.
        loss_scale: the factor of the losses.
        island: ranks on whose batches this one updates; None: all.
        in_no_sync: whether the script is inside ``no_sync()``.
        backward_done: whether ``step()`` is next.
        exchanged: whether the averages are there: by the last backward pass.
        alone: whether all backward passes so far were in ``no_sync()``.
    """

    def __init__(
        self,
        accumulate: int,
        ranks: int,
        loader: UnevenInputLoader | None,
        balance: SampleBalance | None,
    ) -> None:
        self.accumulate, self._ranks, self._loader = accumulate, ranks, loader
        self._balance = balance
        self._passes = 0  # backward passes that a step() has ended
        self._counted = False  # whether the present pass is among the contributions
        self.contributions = 0
        self.loss_scale = 1.0
        self.island: Sequence[int] | None = None
        self.in_no_sync = self.backward_done = self.exchanged = self.alone = False

    @property
    def open(self) -> bool:
        """Whether gradients were gathered that no update has used yet."""
        return self.contributions > 0 or self.passes > 0

    @property
    def update_follows(self) -> bool:
        """Whether ``step()`` after this, or the next, backward pass updates."""
        return self._last and not self.in_no_sync

    @property
    def update_due(self) -> bool:
        """Whether the averages of an update are there: ``step()`` is next."""
        return self.backward_done and self.update_follows and self.exchanged

    def __str__(self) -> str:
        """Say where the script is, for an error."""
        if self.in_no_sync:
            return "no_sync()"
        if self.backward_done and self._last:
            return "a window whose last backward() was in no_sync()"
        return f"an accumulation window of {self.accumulate} backward passes"

    @property
    def passes(self) -> int:
        """Backward passes of this window so far."""
        return self._passes + self._counted

    @property
    def _last(self) -> bool:
        return self._passes == self.accumulate - 1

    @property
    def scale(self) -> float:
        """The factor that turns the sum over ranks of the gradients of ``loss / accumulate`` into
        the mean over all contributions."""
        # of none, where a rank is alone and has no batch: there is no gradient to scale
        return self.accumulate / max(self.contributions, 1) / self.loss_scale

    @property
    def weight(self) -> float:
        """Weight of the present batch's loss, by its samples among those of all ranks."""
        return 1.0 if self._balance is None else self._balance.weight

    def count(self) -> bool:
        """A backward pass begins; whether this rank's batch is a dummy batch.

        Several calls before ``advance()`` count once: several losses of one batch.
        """
        loader = self._loader  # "is None": a loader without a length has no truth value
        dummy = loader is not None and loader.dummy_batch
        self.alone = self.in_no_sync and (self.alone or not self.open)
        if not self._counted:
            self.contributions += self._contributors()
            self._counted = True
        return dummy

    def _contributors(self) -> int:
        """Ranks with a batch among those that average."""
        active = self._ranks if self._loader is None else self._loader.active
        if self.island is None:
            return active
        if self._loader is None:
            return len(self.island)
        return sum(self._loader.has_batch(rank) for rank in self.island)

    def trained_alone(self) -> None:
        """Note an update by gradients of the script's own, without a backward pass."""
        if self._loader is not None:
            self._loader.note_training()

    def check_scale(self, loss_scale: float) -> None:
        """Take a loss scale for the coming backward pass.

        Raises:
            UsageError: it is not a finite number above 0, or differs from that of the window.
        """
        if not 0 < loss_scale < math.inf:
            raise UsageError(f"loss_scale is {loss_scale}; allowed: a finite number above 0")
        if (self._counted or self.contributions) and loss_scale != self.loss_scale:
            raise UsageError(
                f"loss_scale went from {self.loss_scale} to {loss_scale} inside an accumulation "
                "window, which would add up gradients of different scales; change it after the "
                "step() that ends the window"
            )
        self.loss_scale = loss_scale

    def advance(self) -> None:
        """End a backward pass that no update follows; in ``no_sync()`` another one adds to it."""
        self.backward_done = False
        if not self.in_no_sync:
            self._counted = False
            self._passes = (self._passes + 1) % self.accumulate

    def close(self) -> None:
        """The update is done, also of a window that was not full."""
        self.backward_done = self.exchanged = self._counted = False
        self._passes = self.contributions = 0
