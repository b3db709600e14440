"""Tensors in tuples, lists, mappings and dataclasses, as models take and return them.

Never changes what it gets: containers are copied.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def mapped(
    value: Any,
    change: Callable[[Any], Any],
    kind: type = torch.Tensor,
    known: dict[int, Any] | None = None,
) -> Any:
    """``value`` with ``change`` applied to each ``kind`` in its tuples, lists, mappings and
    dataclasses; tuples and dataclasses in which nothing changes stay the same objects.

    What refers to one container twice, or to itself, does so in the copy (``known``: the copies of
    containers by their id, so far).

    Example:
        >>> mapped({"a": (torch.ones(2), 3)}, lambda x: tuple(x.shape))
        {'a': ((2,), 3)}
    """
    if isinstance(value, kind):
        return change(value)
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]

    def each(item: Any) -> Any:
        return mapped(item, change, kind, known)

    if isinstance(value, dict | UserDict):
        known[id(value)] = found = copy.copy(value)
        for key, item in value.items():
            found[key] = each(item)
    elif isinstance(value, list):
        known[id(value)] = other = copy.copy(value)
        other[:] = map(each, value)
    elif isinstance(value, tuple):
        known[id(value)] = _mapped_tuple(value, each)
    elif is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        known[id(value)] = copy.copy(value)
        known[id(value)] = _mapped_fields(value, known[id(value)], each)
    return known.get(id(value), value)


def _mapped_tuple(value: tuple[Any, ...], each: Callable[[Any], Any]) -> tuple[Any, ...]:
    items = tuple(map(each, value))
    if all(after is before for after, before in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _mapped_fields(value: Any, found: Any, each: Callable[[Any], Any]) -> Any:
    """A dataclass, also a frozen one and with fields that it sets itself; in its copy ``found``."""
    before = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    after = {name: each(item) for name, item in before.items()}
    if all(after[name] is item for name, item in before.items()):
        return value
    for name, item in after.items():
        object.__setattr__(found, name, item)
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses, in order."""
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor  # for containers that look at what they get

    mapped(value, see)
    return found
