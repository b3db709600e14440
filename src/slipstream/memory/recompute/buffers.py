"""Update buffers (such as the running statistics of batch normalisation) once per forward, even
though a region runs again in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.memory.recompute.module_state import modules_in

_Key = tuple[nn.Module, str]
RegionBuffers = dict[_Key, Tensor | None]
"""Buffers by module and name; a registered buffer may be None."""

_SMALL = 2**16
"""Copies of floats up to this many bytes are kept without checking that they are needed: most are
running statistics."""

_ABSENT: Any = object()
"""Stands for the value of a buffer that did not exist before the first run."""


class BufferReplay:
    """Contexts for the first run of ``modules`` and for their recomputation.

    In recomputation the buffers are replaced by copies of their values before the first run: a
    forward that reads what it updates computes the same again, and the buffers themselves keep the
    values of the first run. Copies of large buffers and of integers that the first run did not
    change, such as tables, are dropped after it. Changes are detected by value; for large bool
    masks by value once, then by version counter. Exactness: bitwise, except for a large mask that
    is first changed through ``.data`` in a later call.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> first, recomputation = BufferReplay([layer]).contexts()
        >>> with first:
        ...     y = layer(torch.eye(2))
        >>> with recomputation:
        ...     y = layer(torch.eye(2))
        >>> layer.num_batches_tracked
        tensor(1)
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._unchanged_masks: dict[_Key, tuple[int, int]] = {}  # id and version

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of one call: of its first run, and of its recomputation (reusable)."""
        copies: RegionBuffers = {}
        return self._first_run(copies), SubstituteBuffers(copies)

    @contextmanager
    def _first_run(self, copies: RegionBuffers) -> Iterator[None]:
        """Fill ``copies`` with the values from before the run, as far as it changes them."""
        modules = modules_in(self._modules)  # of now: a module inside may have been replaced
        before = buffers_of(modules)
        compared = {
            key: b._version
            for key, b in before.items()
            if b is not None
            and b.layout is torch.strided
            and (b.nbytes > _SMALL or not b.is_floating_point())
        }
        copies.update(_copied(before))
        yield
        for key, buffer in buffers_of(modules).items():
            if key not in before:
                copies[key] = _ABSENT
            elif (
                buffer is before[key]
                and buffer is not None
                and buffer._version == compared.get(key)
            ):
                # Compared by value, as neither batch normalisation nor ``.data`` increases the
                # version. The comparison reads the whole buffer, so a large mask that did not
                # change once is trusted.
                now, copy = (id(buffer), buffer._version), copies[key]
                is_mask = buffer.dtype == torch.bool and buffer.nbytes > _SMALL
                trusted = is_mask and self._unchanged_masks.get(key) == now
                if trusted or (copy is not None and torch.equal(copy, buffer)):
                    self._unchanged_masks[key] = now
                    del copies[key]


class SubstituteBuffers:
    """A context in which copies of ``values`` replace the buffers of these keys.

    Buffers that ``modules`` register inside are removed on exit. May be entered several times.
    """

    def __init__(self, values: RegionBuffers, modules: Iterable[nn.Module] = ()) -> None:
        self._values, self._modules = values, [*modules]
        self._originals: RegionBuffers = {}

    def __enter__(self) -> None:
        for (module, name), value in _copied(self._values).items():
            self._originals[module, name] = getattr(module, name)
            if value is _ABSENT:
                del module._buffers[name]
            else:
                setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        for module, name in buffers_of(self._modules).keys() - self._values.keys():
            del module._buffers[name]
        for (module, name), buffer in self._originals.items():
            module._buffers[name] = buffer
        self._originals = {}


def buffers_of(modules: Iterable[nn.Module]) -> RegionBuffers:
    """The buffers that these modules register themselves, without those of their submodules."""
    return {
        (module, name): buffer
        for module in modules
        if module._buffers
        for name, buffer in module._buffers.items()
    }


def _copied(buffers: RegionBuffers) -> RegionBuffers:
    """Copy each buffer once; buffers that are one tensor, or share a storage, still do so."""
    if not buffers:
        return {}
    originals = {id(b): b for b in buffers.values() if isinstance(b, Tensor)}
    copies = {key: buffer.clone() for key, buffer in originals.items()}
    by_storage: dict[int, list[int]] = {}
    for key, buffer in originals.items():
        if buffer.layout is torch.strided and buffer.numel():
            by_storage.setdefault(buffer.untyped_storage().data_ptr(), []).append(key)
    for keys in by_storage.values():
        if len(keys) > 1:  # views of one storage stay views of one another
            storage = originals[keys[0]].untyped_storage().clone()
            for key in keys:
                view = originals[key]
                copies[key].set_(storage, view.storage_offset(), view.size(), view.stride())
    return {key: copies.get(id(buffer), buffer) for key, buffer in buffers.items()}
