"""Replay the random numbers of Python and numpy when a region runs again.

Those of torch are replayed by ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

RngState = tuple[tuple[Any, ...], bytes]


def get_rng_state() -> RngState:
    """State of the global generators of Python and numpy; equal until a number is drawn.

    The state of numpy is pickled because it contains an array, which does not compare to a bool.
    """
    return random.getstate(), _numpy_state.read()


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


class _NumpyState:
    """The state of numpy's global generator, asked for only where it has changed.

    numpy takes 0.1 ms to hand it out. Its words lie in memory that is read in a microsecond, but
    normal numbers are drawn in pairs, and one that waits for its turn lies elsewhere. The same
    words are the same state while none waits; where one was ever seen waiting, numpy is asked.
    """

    def __init__(self) -> None:
        self._words, self._state = b"", b""
        self._any_waited = False

    def read(self) -> bytes:
        words = _words()
        if words and words == self._words and not self._any_waited:
            return self._state
        state: Any = np.random.get_state(legacy=False)
        self._any_waited |= bool(state["has_gauss"])
        known = words == _words_of(state) if words else False
        self._words, self._state = words if known else b"", pickle.dumps(state)
        return self._state


_numpy_state = _NumpyState()


def _words() -> bytes:
    """The memory of a Mersenne Twister, which is numpy's default: its words, and how many of them
    were used; nothing of another generator."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 4 * (624 + 1))


def _words_of(state: Any) -> bytes:
    """Read the words that `_words` should give, from the state itself."""
    twister = state["state"]
    return bytes(twister["key"].tobytes() + int(twister["pos"]).to_bytes(4, sys.byteorder))
