"""Random numbers that Python and numpy draw come out the same when a region runs again; those of
torch are the affair of ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

State = tuple[tuple[Any, ...], bytes]


def state() -> State:
    """Of the global generators of Python and numpy; equal as long as nothing is drawn."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


class SameDraws:
    """A context, to be entered any number of times, in which the generators continue from where
    they were when it was made; afterwards they are as before.

    Where the first run draws nothing, which is usual, the others leave the generators alone.
    Generators of one's own (``random.Random``, ``numpy.random.default_rng()``) are not seen.
    Exactness: bitwise.

    Example:
        >>> draws = SameDraws()
        >>> with draws.first():
        ...     x = random.random()
        >>> y = random.random()
        >>> with draws:
        ...     x == random.random()
        True
    """

    def __init__(self) -> None:
        self._start: State | None = state()
        self._now: State | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first run; sees whether it draws."""
        yield
        if state() == self._start:
            self._start = None

    def __enter__(self) -> None:
        if self._start is not None:
            self._now = state()
            _set(self._start)

    def __exit__(self, *_: object) -> None:
        if self._now is not None:
            _set(self._now)
            self._now = None


def _set(to: State) -> None:
    random.setstate(to[0])
    np.random.set_state(pickle.loads(to[1]))
