"""Gradients that a loss of another session leaves in a model through which it runs.

The loss of a GAN's generator runs through the discriminator, for one. Inside ``no_sync()`` it may
add gradients there, which nobody means to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakSet

from torch import nn

from slipstream.errors import warn
from slipstream.session import messages
from slipstream.session.zeroing import is_zero

Marks = dict[nn.Parameter, tuple[int, int]]
"""By parameter, which gradient is there, and its version."""


class OtherLosses:
    """Notes what losses of other sessions add to a model, until its own next backward pass.

    Args:
        model: of this session.
    """

    _open: ClassVar[WeakSet[OtherLosses]] = WeakSet()
    """Those of sessions that are inside ``no_sync()``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = tuple(model.parameters())
        self._added: Marks = {}
        self._warned = False
        self._turns = 0  # begins and ends of own passes: odd inside one, in another thread, say

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, passes of other sessions may add gradients to this model."""
        outermost = self not in OtherLosses._open
        OtherLosses._open.add(self)
        try:
            yield
        finally:
            if outermost:
                OtherLosses._open.discard(self)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, a backward pass of this session runs, which others note."""
        idle = [o for o in [*OtherLosses._open] if o is not self and not o._turns % 2]
        others = [(other, other._turns, other._marks()) for other in idle]
        self._turns += 1
        try:
            yield
        finally:
            self._turns += 1
        for other, turns, before in others:
            if other._turns == turns:
                marks = other._marks().items()
                other._added |= {p: mark for p, mark in marks if before.get(p) != mark}

    def check(self, window: str) -> None:
        """Refuse what was added to the sums of an accumulation window, which nobody can zero.

        Args:
            window: in words.

        Raises:
            UsageError: something was.
        """
        if kept := self._kept():
            raise messages.others_in_window(kept, window)

    def warn_if_kept(self) -> None:
        """Warn, once, where a pass of this session is about to add to what is still there."""
        if not self._warned and (kept := self._kept()):
            self._warned = True
            warn(messages.others_kept(kept))
        self._added = {}

    def _kept(self) -> str:
        """Name a parameter that still has what was added to it."""
        if not self._added:
            return ""
        now = self._marks()
        kept = {p for p, mark in self._added.items() if now.get(p) == mark}
        named = self._model.named_parameters()
        return next((name for name, p in named if p in kept and not is_zero(p)), "")

    def _marks(self) -> Marks:
        present = ((p, p.grad) for p in self._parameters)
        return {p: (id(grad), grad._version) for p, grad in present if grad is not None}
