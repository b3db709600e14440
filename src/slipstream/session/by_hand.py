"""Notices a script that changes parameters by their gradients itself, with no step of an optimizer.

Of an optimizer a hook tells. What a script writes by hand, ``p.data.add_(p.grad, alpha=-lr)``,
shows in values alone: some are kept from backward to where gradients are zeroed, until an optimizer
has stepped, as scripts do one or the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

IN_A_ROW = 20
"""Such updates before something is said: an optimizer that moves weights along the gradients, and
back before its step, does so a few times."""


class UpdatesByHand:
    """Counts updates that a script has made itself.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._rows: list[torch.Tensor] = []
        self._count: int | None = 0  # None: an optimizer has stepped

    def note(self) -> None:
        """Look at parameters, of which backward has just left the gradients."""
        if self._count is not None:
            self._rows = [_row(p).clone() for p in self._parameters]

    def stepped(self) -> None:
        """Look no more: an optimizer has stepped."""
        self._rows, self._count = [], None

    @property
    def found(self) -> bool:
        """Whether this is the time to say that updates are made by hand; asked once where the
        script has zeroed gradients that no optimizer has used."""
        if self._count is None or not self._rows:
            return False
        pairs = zip(self._rows, map(_row, self._parameters), strict=True)
        changed = not all(torch.equal(before, now) for before, now in pairs)
        self._count = self._count + 1 if changed else 0
        return self._count == IN_A_ROW


def _row(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    return values[:1] if values.dim() else values
