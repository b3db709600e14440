"""Tensors in tuples, lists and mappings, as models take and return them.

Never changes what it gets: containers are copied.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch


def mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """``value`` with ``change`` applied to each ``kind`` in its tuples, lists and mappings.

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
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists and mappings, in order."""
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor  # for containers that look at what they get

    mapped(value, see)
    return found
