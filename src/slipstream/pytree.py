"""Apply functions to the tensors in nested tuples, lists, mappings and dataclasses.

Inputs are never modified: containers are copied. ``torch.utils._pytree`` is private and knows
neither plain dataclasses nor ``UserDict``.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch

T = TypeVar("T")
LEAVES = (torch.Tensor, bool, int, float, str, bytes, type(None))
"""Most values. Looked at first, as the tests for containers take microseconds each."""


def mapped(
    value: Any,
    change: Callable[[Any], Any],
    kind: type | tuple[type, ...] = torch.Tensor,
    copies: dict[int, Any] | None = None,
    others: Callable[[Any], Any] | None = None,
) -> Any:
    """Return ``value`` with ``change`` applied to each ``kind`` in it.

    Descends into tuples, lists, mappings and dataclasses and copies them; a tuple or dataclass in
    which nothing changes is returned as it is. Containers that are referenced twice, or that
    contain themselves, have the same structure in the copy.

    Args:
        value: any object.
        change: called with each instance of ``kind``.
        kind: the class to look for, or several.
        copies: copies made so far by the id of their original; for the recursion.
        others: called with each object that is none of these, and each dataclass in which nothing
            changes; what it returns takes their place. None: they stay.

    Example:
        >>> mapped({"a": (torch.ones(2), 3)}, lambda x: tuple(x.shape))
        {'a': ((2,), 3)}
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, LEAVES):
        return value
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]

    def each(item: Any) -> Any:
        return mapped(item, change, kind, copies, others)

    # Copies of mutable containers are registered before the descent, which may meet them again.
    if isinstance(value, dict | UserDict):
        copies[id(value)] = mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = each(item)
    elif isinstance(value, list):
        copies[id(value)] = items = copy.copy(value)  # keeps attributes of subclasses
        items[:] = map(each, value)
    elif isinstance(value, tuple):
        copies[id(value)] = _mapped_tuple(value, each)
    elif is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        copies[id(value)] = copy.copy(value)
        copies[id(value)] = _mapped_fields(value, copies[id(value)], each)
    found = copies.get(id(value), value)
    if others is not None and found is value and not isinstance(value, tuple):
        copies[id(value)] = found = others(value)
    return found


def _mapped_tuple(value: tuple[Any, ...], each: Callable[[Any], Any]) -> tuple[Any, ...]:
    items = tuple(map(each, value))
    if all(after is before for after, before in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _mapped_fields(value: Any, clone: Any, each: Callable[[Any], Any]) -> Any:
    """Fill ``clone``, a copy of the dataclass ``value``; return ``value`` if no field changes."""
    before = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    after = {name: each(item) for name, item in before.items()}
    if all(after[name] is item for name, item in before.items()):
        return value
    for name, item in after.items():
        object.__setattr__(clone, name, item)  # the dataclass may be frozen
    return clone


def tensors(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    seen: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor  # containers such as PackedSequence inspect what they are built from

    mapped(value, see)
    return seen


def checksum(value: object) -> int:
    """A checksum of the tensors in nested tuples, lists, mappings and dataclasses.

    Example:
        >>> checksum((torch.ones(2), {"x": [torch.zeros(1)]})) == checksum((torch.ones(2),))
        False
    """
    total = 0
    for tensor in tensors(value):
        # a view of one value may have any stride, which `contiguous` lets be
        flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
        total = crc32(flat.view(torch.uint8).numpy().tobytes(), total + tensor.dim())
    return total


def plain_numbers(value: Any) -> Any:
    """Return ``value`` with numbers of numpy, such as a schedule's learning rates, as Python's:
    torch reads no others as data.

    Example:
        >>> plain_numbers({"lr": np.float64(0.5), "step": 3})
        {'lr': 0.5, 'step': 3}
    """
    return mapped(value, lambda number: number.item(), np.generic)


def among(values: Iterable[Any], kind: type[T]) -> Iterator[T]:
    """Yield those of exactly this class among arguments, which may be in lists.

    Example:
        >>> [*among([1, [2, ("3", True)]], int)]
        [1, 2]
    """
    for value in values:
        if type(value) is kind:
            yield value
        elif isinstance(value, list | tuple):
            yield from among(value, kind)
