"""Buffers that forward updates, such as the running statistics of batch normalisation, are updated
once, however often a region runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_Place = tuple[nn.Module, str]
Buffers = dict[_Place, torch.Tensor | None]
"""By place; a buffer may be None for now."""

_SMALL = 2**16
"""Bytes of a copy that is kept without a look at whether it is needed."""


class UpdatedOnce:
    """Contexts for the first and for every other run of modules; see ``torch.utils.checkpoint``.

    While modules run again, copies of the buffers stand in their place, with the values from before
    the first run: the buffers themselves stay what the first run has made of them, and a forward
    that reads what it updates computes the same again. Copies of large buffers that the first run
    did not change, such as masks, are let go at once. Exactness: bitwise.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> first, again = UpdatedOnce([layer]).contexts()
        >>> with first:
        ...     y = layer(torch.eye(2))
        >>> with again:
        ...     y = layer(torch.eye(2))
        >>> layer.num_batches_tracked
        tensor(1)
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [inner for module in modules for inner in module.modules()]

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of one run, and of its repetitions; the second may be entered several times."""
        copies: Buffers = {}
        return self._first(copies), StandIns(copies)

    @contextmanager
    def _first(self, copies: Buffers) -> Iterator[None]:
        """Fills ``copies`` with the values from before of what is updated inside."""
        before = buffers_of(self._modules)
        copies.update(_copied(before))
        yield
        for place, buffer in buffers_of(self._modules).items():
            copy = copies.get(place)
            if buffer is None or copy is None or buffer is not before[place]:
                continue
            # by value, for neither batch normalisation nor ``.data`` counts versions
            if copy.nbytes > _SMALL and torch.equal(copy, buffer):
                copies[place] = buffer


class StandIns:
    """A context in which copies of ``values`` stand in the place of buffers."""

    def __init__(self, values: Buffers) -> None:
        self._values = values
        self._real: Buffers = {}

    def __enter__(self) -> None:
        for (module, name), value in _copied(self._values).items():
            self._real[module, name] = getattr(module, name)
            setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        for (module, name), buffer in self._real.items():
            setattr(module, name, buffer)
        self._real = {}


def buffers_of(modules: Iterable[nn.Module]) -> Buffers:
    """The buffers of these modules, without those inside, each with its place; also those that are
    None for now.
    """
    return {
        (module, name): buffer for module in modules for name, buffer in module._buffers.items()
    }


def _copied(buffers: Buffers) -> Buffers:
    """One copy of each, also where several places hold the same."""
    copies = {id(buffer): buffer.clone() for buffer in buffers.values() if buffer is not None}
    return {place: copies.get(id(buffer)) for place, buffer in buffers.items()}
