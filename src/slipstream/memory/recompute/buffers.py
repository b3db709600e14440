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

_MADE: Any = object()
"""In the place of the value of a buffer that was not there yet."""


class UpdatedOnce:
    """Contexts for the first and for every other run of modules; see ``torch.utils.checkpoint``.

    While modules run again, copies of the buffers stand in their place, with the values from before
    the first run: the buffers themselves stay what the first run has made of them, and a forward
    that reads what it updates computes the same again. Copies of large buffers that the first run
    did not change, such as tables, are let go at once; whether it did is seen by their values, of
    masks (bool) in the first call only, and from then on by the count of changes that torch keeps.
    Exactness: bitwise, but for a large mask that is first changed through ``.data`` in a later
    call.

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
        self._constant: dict[_Place, tuple[int, int]] = {}  # identity and count of changes

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of one run, and of its repetitions; the second may be entered several times."""
        copies: Buffers = {}
        return self._first(copies), StandIns(copies)

    @contextmanager
    def _first(self, copies: Buffers) -> Iterator[None]:
        """Fills ``copies`` with the values from before of what is updated inside."""
        before = buffers_of(self._modules)
        versions = {place: b._version for place, b in before.items() if b is not None}
        copies.update(_copied(before))
        yield
        for place, buffer in buffers_of(self._modules).items():
            if place not in before:
                copies[place] = _MADE
            elif buffer is not None and buffer is before[place] and _is_large(buffer):
                self._forget_constant(place, buffer, versions[place], copies)

    def _forget_constant(
        self, place: _Place, buffer: torch.Tensor, version: int, copies: Buffers
    ) -> None:
        """Let go of the copy of a large buffer that a run has left as it was."""
        if buffer._version != version:
            return
        now, copy = (id(buffer), version), copies[place]
        # by value, for neither batch normalisation nor ``.data`` counts versions
        seen = buffer.dtype == torch.bool and self._constant.get(place) == now
        if seen or (copy is not None and torch.equal(copy, buffer)):
            self._constant[place] = now
            del copies[place]


class StandIns:
    """A context in which copies of ``values`` stand in the place of buffers; those that ``modules``
    make inside are gone afterwards.
    """

    def __init__(self, values: Buffers, modules: Iterable[nn.Module] = ()) -> None:
        self._values, self._modules = values, [*modules]
        self._real: Buffers = {}

    def __enter__(self) -> None:
        for (module, name), value in _copied(self._values).items():
            self._real[module, name] = getattr(module, name)
            if value is _MADE:
                del module._buffers[name]
            else:
                setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        for module, name in buffers_of(self._modules).keys() - self._values.keys():
            del module._buffers[name]
        for (module, name), buffer in self._real.items():
            module._buffers[name] = buffer
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
    tensors = {id(b): b for b in buffers.values() if isinstance(b, torch.Tensor)}
    copies = {number: buffer.clone() for number, buffer in tensors.items()}
    by_storage: dict[int, list[int]] = {}
    for number, buffer in tensors.items():
        if buffer.layout is torch.strided and buffer.numel():
            by_storage.setdefault(buffer.untyped_storage().data_ptr(), []).append(number)
    for numbers in by_storage.values():
        if len(numbers) > 1:  # views of one another stay so
            storage = tensors[numbers[0]].untyped_storage().clone()
            for number in numbers:
                its = tensors[number]
                place = its.storage_offset(), its.size(), its.stride()
                copies[number].set_(storage, *place)
    return {place: copies.get(id(buffer), buffer) for place, buffer in buffers.items()}


def _is_large(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.nbytes > _SMALL
