"""Buffers that forward updates, such as the running statistics of batch normalisation, are updated
once, however often a region runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_Place = tuple[nn.Module, str]


class UpdatedOnce:
    """Contexts for the first and for every other run of modules; see ``torch.utils.checkpoint``.

    While modules run again, copies of the buffers stand in their place, with the values from before
    the first run: the buffers themselves stay what the first run has made of them, and a forward
    that reads what it updates computes the same again. Which buffers forward updates is seen in the
    first run, and once more where modules change between training and evaluation; only those are
    copied. Exactness: bitwise.

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
        self._updated: dict[tuple[bool, ...], frozenset[_Place]] = {}

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of one run, and of its repetitions; the second may be entered several times."""
        copies: dict[_Place, torch.Tensor] = {}
        return self._first(copies), StandIns(copies)

    @contextmanager
    def _first(self, copies: dict[_Place, torch.Tensor]) -> Iterator[None]:
        """Fills ``copies`` with the values from before of what is updated inside."""
        training = tuple(inner.training for inner in self._modules)
        before = buffers_of(self._modules)
        known = self._updated.get(training)
        copies.update({p: b.clone() for p, b in before.items() if known is None or p in known})
        yield
        if known is None:  # by value, for batch normalisation does not count versions
            after = buffers_of(self._modules)
            for place in [p for p, copy in copies.items() if torch.equal(copy, after[p])]:
                del copies[place]
            self._updated[training] = frozenset(copies)


class StandIns:
    """A context in which copies of ``values`` stand in the place of buffers."""

    def __init__(self, values: Mapping[_Place, torch.Tensor]) -> None:
        self._values = values
        self._real: dict[_Place, torch.Tensor] = {}

    def __enter__(self) -> None:
        for (module, name), value in self._values.items():
            self._real[module, name] = getattr(module, name)
            setattr(module, name, value.clone())

    def __exit__(self, *_: object) -> None:
        for (module, name), buffer in self._real.items():
            setattr(module, name, buffer)
        self._real = {}


def buffers_of(modules: Iterable[nn.Module]) -> dict[_Place, torch.Tensor]:
    """The buffers of these modules, without those inside, each with its place."""
    return {
        (module, name): buffer
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    }
