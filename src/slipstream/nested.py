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


def mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """``value`` with ``change`` applied to each ``kind`` in its tuples, lists, mappings and
    dataclasses; one of the latter in which nothing changes stays the same object.

    Example:
        >>> mapped({"a": (torch.ones(2), 3)}, lambda x: tuple(x.shape))
        {'a': ((2,), 3)}
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict | UserDict):
        found = copy.copy(value)
        for key, item in value.items():
            found[key] = mapped(item, change, kind)
        return found
    if isinstance(value, tuple | list):
        items = [mapped(item, change, kind) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        return _mapped_fields(value, change, kind)
    return value


def _mapped_fields(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """A dataclass, also a frozen one and with fields that it sets itself."""
    before = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    after = {name: mapped(item, change, kind) for name, item in before.items()}
    if all(after[name] is item for name, item in before.items()):
        return value
    found = copy.copy(value)
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
