"""Replay the random numbers of Python and numpy when a region runs again.

Those of torch are replayed by ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

RngState = tuple[tuple[Any, ...], bytes]


def get_rng_state() -> RngState:
    """State of the global generators of Python and numpy; equal until a number is drawn.

    The state of numpy is pickled because it contains an array, which does not compare to a bool.
    """
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def set_rng_state(state: RngState) -> None:
    """Restore what `get_rng_state` returned."""
    random.setstate(state[0])
    np.random.set_state(pickle.loads(state[1]))


class RngReplay:
    """A context in which the generators restart from their state at construction.

    It may be entered any number of times; on exit the generators continue from where they were
    before. If the run under `record` drew no numbers (the usual case), later entries leave the
    generators alone. Generator objects (``random.Random``, ``numpy.random.default_rng()``) are not
    replayed. Exactness: bitwise.

    Example:
        >>> replay = RngReplay()
        >>> with replay.record():
        ...     x = random.random()
        >>> y = random.random()
        >>> with replay:
        ...     x == random.random()
        True
    """

    def __init__(self) -> None:
        self._start: RngState | None = get_rng_state()
        self._outside: RngState | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Wrap the first run; notices whether it draws."""
        yield
        if get_rng_state() == self._start:
            self._start = None

    def __enter__(self) -> None:
        if self._start is not None:
            self._outside = get_rng_state()
            set_rng_state(self._start)

    def __exit__(self, *_: object) -> None:
        if self._outside is not None:
            set_rng_state(self._outside)
            self._outside = None
