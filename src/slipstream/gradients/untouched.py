"""Gradients that a script must leave alone between two calls of the engine.

They are remembered with their versions, which torch counts up where a tensor is changed in place,
and some of them by a row, which shows where a script changes their ``data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from slipstream.gradients.finite import stored
from slipstream.gradients.messages import average_changed, sum_changed
from slipstream.gradients.momentum import largest_values
from slipstream.gradients.segments import NamedParameter

SAMPLES, VALUES = 64, 4096
"""Gradients, and values of each, that are looked at: a script that clips does so with many."""


class Untouched:
    """Sums of a window that is open, and averages in which a codec has put momentum.

    Args:
        trainables: the parameters whose gradients these are.
    """

    def __init__(self, trainables: Sequence[NamedParameter]) -> None:
        self._trainables = trainables
        self._sums: list[tuple[NamedParameter, torch.Tensor, int]] = []
        self._rows = torch.empty(0)  # largest values of a row of some of these
        self._moved: list[tuple[list[str], torch.Tensor]] = []  # which have changed by ``data``
        self._averages: list[tuple[NamedParameter, torch.Tensor, int]] = []
        self._largest: torch.Tensor | None = None  # values of these
        self._updated = False  # with averages that were looked at

    def note_sums(self) -> None:
        """Remember the gradients: they are sums of this rank."""
        self._sums = self._present()
        self._rows = _rows(_some(self._sums))

    def forget_sums(self) -> None:
        """Let them change: they came outside of a backward pass of the session."""
        self._sums = []

    def check_sums(self) -> bool:
        """Refuse sums that were changed inside a window: clipped, say, by a norm that is another
        one on each rank; return whether they were zeroed instead, all of them. What was changed
        by ``data``, which torch does not count, `moved` tells later.

        Raises:
            UsageError: names the parameter.
        """
        sums, self._sums = self._sums, []
        zeroed = 0
        if sums and all(t.parameter.grad is g and g._version == v for t, g, v in sums):
            rows = _rows(_some(sums))
            # without a look, for which a device would wait
            moved = rows.ne(self._rows) & rows.ne(0)
            self._moved.append(([t.name for t, _, _ in _some(sums)], moved))
            return False
        for trainable, before, version in sums:
            now = trainable.parameter.grad
            if now is before and now._version == version:
                continue
            if now is not None and stored(now).any():
                raise sum_changed(trainable.name)
            zeroed += 1
        return 0 < zeroed == len(sums)

    def moved(self) -> str | None:
        """Name a parameter whose sums were changed by ``data``: clipped one by one, say."""
        found, self._moved = self._moved, []
        if not found or not torch.cat([moved for _, moved in found]).any():
            return None
        return next(n for names, moved in found for n, m in zip(names, moved, strict=True) if m)

    def note_averages(self) -> None:
        """Remember the gradients: they are averages with momentum."""
        self._averages = self._present()
        self._largest = self._largest_now() if self._updated else None

    def check_averages(self) -> None:
        """Refuse averages that were changed.

        Raises:
            UsageError: names the parameter.
        """
        for trainable, before, version in self._averages:
            now = trainable.parameter.grad
            if now is not before or now._version != version:
                raise average_changed(trainable.name)
        self._updated = True
        if self._largest is not None and not self._largest.equal(self._largest_now()):
            raise average_changed(self._averages[0][0].name)

    def forget(self) -> None:
        """Let all change: the update is done."""
        self._sums, self._averages, self._largest = [], [], None
        self._moved = []

    def _present(self) -> list[tuple[NamedParameter, torch.Tensor, int]]:
        with_gradient = ((t, t.parameter.grad) for t in self._trainables)
        return [(t, g, g._version) for t, g in with_gradient if g is not None]

    def _largest_now(self) -> torch.Tensor:
        """The first division of a GradScaler is right, as there is no momentum yet: so these are
        looked at from the second update on."""
        gradients = (gradient for _, gradient, _ in self._averages)
        return largest_values(map(stored, gradients))


def _some(
    sums: Sequence[tuple[NamedParameter, torch.Tensor, int]],
) -> Sequence[tuple[NamedParameter, torch.Tensor, int]]:
    return sums[:: -(-len(sums) // SAMPLES) or 1]


def _rows(sums: Iterable[tuple[NamedParameter, torch.Tensor, int]]) -> torch.Tensor:
    """The largest value in the first row of each: enough to see that it was scaled."""
    values = (stored(gradient) for _, gradient, _ in sums)
    return largest_values(g[:1].flatten()[:VALUES] if g.dim() else g for g in values)
