"""Batches of any form: what ranks compare of one, and a copy that a script cannot change."""

from __future__ import annotations

import copy
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any
from zlib import crc32

import torch

from slipstream.pytree import LEAVES, checksum, mapped


def content_of(batch: Any) -> int:
    """A checksum of a batch; 0 where it has no tensors, or anything that may differ unseen."""
    found: list[Any] = []

    def see(value: Any) -> Any:
        found.append(value)
        return value

    def other(value: Any) -> Any:
        if not is_dataclass(value):
            raise TypeError
        return value

    try:
        mapped(batch, see, kind=LEAVES, others=other)
        values = [value for value in found if isinstance(value, torch.Tensor)]
        rest = [value for value in found if not isinstance(value, torch.Tensor)]
        full = any(value.numel() for value in values)
        return crc32(repr(rest).encode(), checksum(values)) if full else 0
    except Exception:  # sparse and nested tensors, arrays, and objects of the user's
        return 0


def copied(batch: Any) -> Any:
    """The same tensors in lists, mappings and objects of their own: a script may change those that
    it gets."""
    if type(batch) is list:
        alone = all(isinstance(entry, LEAVES) for entry in batch)  # as numbers of tokens
        return [*batch] if alone else [copied(entry) for entry in batch]
    try:
        return mapped(batch, lambda tensor: tensor, others=_copied_object)
    except Exception:  # a container of the user's, which refuses in a way of its own
        return batch


def _copied_object(batch: Any) -> Any:
    """An object with the same attributes; itself where it is values, as an image or an array is,
    whose copy is one of all of them, or owns something."""
    kind: Any = type(batch)
    own = (torch.nn.Module, type, FunctionType)
    values = any(hasattr(kind, name) for name in ("__array__", "__array_interface__", "__del__"))
    has_attributes = is_dataclass(batch) or hasattr(batch, "__dict__")
    if values or isinstance(batch, own) or not has_attributes:
        return batch
    slots = any(vars(one).get("__slots__") for one in kind.__mro__)
    if slots or hasattr(kind, "__copy__") or kind.__new__ is not object.__new__:
        try:
            return copy.copy(batch)
        except Exception:  # so may an object: what is beside it is copied all the same
            return batch
    found = kind.__new__(kind)
    vars(found).update(vars(batch))  # not by __getstate__, which may leave some out
    return found
