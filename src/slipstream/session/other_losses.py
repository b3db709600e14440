"""Gradients that a loss of another session leaves in a model through which it runs.

The loss of a GAN's generator runs through the discriminator, for one. Inside ``no_sync()`` it may
add gradients there, which nobody means to keep.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

from torch import nn

from slipstream.session import messages

Marks = dict[nn.Parameter, tuple[int, int]]
"""By parameter, which gradient is there, and its version."""


class OtherLosses:
    """Notes what losses of other sessions add to a model, until its own next backward pass.

    Args:
        model: of this session.
    """

    _passes: ClassVar = 0
    """Backward passes of all sessions in this process."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = tuple(model.parameters())
        self._own = 0
        self._added: Marks = {}
        self._warned = False

    def passed(self) -> None:
        """Count a backward pass of this session."""
        self._own += 1
        OtherLosses._passes += 1

    def begin(self) -> tuple[int, int, Marks]:
        """Look at what is there where ``no_sync()`` begins."""
        return self._own, OtherLosses._passes, self._marks()

    def note(self, begun: tuple[int, int, Marks], window: str | None) -> None:
        """Note what has come since ``begin``, if not by a pass of this session.

        Args:
            begun: what that returned.
            window: the accumulation window that is open, in words; None: none is.

        Raises:
            UsageError: a window is open, to whose sums it was added, which nobody can zero.
        """
        own, passes, before = begun
        if own != self._own or passes == OtherLosses._passes:
            return
        self._added = {p: mark for p, mark in self._marks().items() if before.get(p) != mark}
        if self._added and window is not None:
            raise messages.others_in_window(self._name(), window)

    def warn_if_kept(self, stacklevel: int) -> None:
        """Warn, once, where a pass of this session is about to add to what is still there."""
        if not self._added:
            return
        now = self._marks()
        self._added = {p: mark for p, mark in self._added.items() if now.get(p) == mark}
        if self._added and not self._warned:
            self._warned = True
            warnings.warn(messages.others_kept(self._name()), stacklevel=stacklevel + 1)
        self._added = {}

    def _marks(self) -> Marks:
        present = ((p, p.grad) for p in self._parameters)
        return {p: (id(grad), grad._version) for p, grad in present if grad is not None}

    def _name(self) -> str:
        names = {p: name for name, p in self._model.named_parameters()}
        return names.get(next(iter(self._added)), "a parameter")
