"""Replay the random numbers of Python, numpy and modules' own generators when a region runs again.

Those of torch's global generators are replayed by ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

RngState = tuple[tuple[Any, ...], bytes]
Generator = torch.Generator | random.Random | np.random.Generator


def get_rng_state() -> RngState:
    """State of the global generators of Python and numpy; equal until a number is drawn.

    The state of numpy is pickled because it contains an array, which does not compare to a bool.
    """
    return random.getstate(), _numpy_state.read()


def set_rng_state(state: RngState) -> None:
    """Restore what `get_rng_state` returned."""
    random.setstate(state[0])
    np.random.set_state(pickle.loads(state[1]))


def generators_of(modules: Iterable[nn.Module]) -> list[Generator]:
    """Generators that modules have among their attributes; torch's own layers have none."""
    own = (module for module in modules if not type(module).__module__.startswith("torch.nn."))
    found = (v for module in own for v in vars(module).values() if isinstance(v, Generator))
    return [one for one in dict.fromkeys(found) if not isinstance(one, random.SystemRandom)]


def state_of(generator: Generator) -> Any:
    """State of a generator; equal until a number is drawn."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(generator.bit_generator.state)


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = pickle.loads(state)


class RngReplay:
    """A context in which the generators restart from their state at construction: the global ones
    of Python and numpy, and ``own``.

    It may be entered any number of times; on exit the generators continue from where they were
    before. If the run under `record` drew no numbers (the usual case), later entries leave the
    generators alone. Exactness: bitwise.

    Example:
        >>> replay = RngReplay()
        >>> with replay.record():
        ...     x = random.random()
        >>> y = random.random()
        >>> with replay:
        ...     x == random.random()
        True
    """

    def __init__(self, own: Sequence[Generator] = ()) -> None:
        self._start: RngState | None = get_rng_state()
        self._outside: RngState | None = None
        self._own = [(generator, state_of(generator)) for generator in own]
        self._own_outside: list[tuple[Generator, Any]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Wrap the first run; notices whether it draws."""
        yield
        if get_rng_state() == self._start:
            self._start = None
        self._own = [(one, start) for one, start in self._own if state_of(one) != start]

    def __enter__(self) -> None:
        self._own_outside = [(generator, state_of(generator)) for generator, _ in self._own]
        for generator, start in self._own:
            _set_state(generator, start)
        if self._start is not None:
            self._outside = get_rng_state()
            set_rng_state(self._start)

    def __exit__(self, *_: object) -> None:
        for generator, outside in self._own_outside:
            _set_state(generator, outside)
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
