"""The passes over a loader that are under way, of which one is trained on."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar
from weakref import ref


class _Pass(Protocol):
    is_over: bool


P = TypeVar("P", bound=_Pass)


class LivePasses(Generic[P]):
    """Knows the present one of several: a script may look at batches beside its training.

    References are weak: a pass that is left by ``break`` is over.
    """

    def __init__(self) -> None:
        self._asked: list[ref[P]] = []  # in the order of their last batches
        self._trained: ref[P] | None = None  # of which a batch was trained on last

    @property
    def present(self) -> P | None:
        """The pass that was trained on last, or else asked; None: none is under way."""
        known = (self._trained, *reversed(self._asked))
        found = (one() for one in known if one is not None)
        return next((one for one in found if one is not None and not one.is_over), None)

    def note_asked(self, asked: P) -> None:
        """Note that a pass is asked for its next batch."""
        others = (one for one in self._asked if one() is not None and one() is not asked)
        self._asked = [*others, ref(asked)]

    def note_training(self) -> None:
        """Note that the last batch of a pass that is still there is trained on."""
        living = [one for one in self._asked if one() is not None]
        self._trained = living[-1] if living else None
        self._asked = living[-1:]  # the others were looked at, unless they are asked again

    def forget(self) -> None:
        """Let no pass be the present one until it is asked again."""
        self._asked, self._trained = [], None
