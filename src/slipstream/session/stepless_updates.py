"""Notices a script that changes parameters by their gradients itself, with no step of an optimizer.

A hook tells of an optimizer's step. An update that the script writes itself, as
``p.data.add_(p.grad, alpha=-lr)``, shows only in the values of parameters: a few are remembered
after each backward pass and compared where gradients are zeroed, until an optimizer has stepped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

IN_A_ROW = 20
"""Such updates before something is said: an optimizer that moves weights along the gradients, and
back before its step, does so a few times."""


class SteplessUpdates:
    """Counts updates that a script has made itself.

    Args:
        parameters: that this rank trains.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._left: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []  # by backward
        self._count: int | None = 0  # None: an optimizer has stepped

    def note(self) -> None:
        """Look at parameters, of which backward has just left the gradients."""
        if self._count is not None:
            present = ((p, p.grad) for p in self._parameters)
            dense = ((p, g) for p, g in present if g is not None and g.layout == torch.strided)
            self._left = [(p, _row(p).clone(), _row(g).clone()) for p, g in dense]

    def stepped(self) -> None:
        """Look no more: an optimizer has stepped."""
        self._left, self._count = [], None

    def count(self) -> bool:
        """Look where the script has zeroed gradients that no optimizer has used; whether this is
        the time to say that updates are made by hand.

        Only a descent is one: weights are also moved by noise, say, or up the gradients, and back.
        """
        if self._count is None or not self._left:
            return False
        pairs = ((_row(p), before, g) for p, before, g in self._left)
        alike = ((now, before, g) for now, before, g in pairs if now.shape == before.shape)
        move = sum(_along(now.to(before.device) - before, g) for now, before, g in alike)
        self._count = self._count + 1 if move < 0 else 0
        return self._count == IN_A_ROW


def _row(values: torch.Tensor) -> torch.Tensor:
    return values.detach()[:1] if values.dim() else values.detach()


def _along(move: torch.Tensor, gradient: torch.Tensor) -> float:
    """Scalar product of a move and a gradient: negative where it descends."""
    wide = torch.complex128 if move.is_complex() else torch.float64
    return float((move.to(wide) * gradient.to(wide).conj()).real.sum())
