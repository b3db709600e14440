"""Whether a script has changed a dataset, or how batches are put together, since those who read
got theirs.

Workers have a copy, and what comes next was read before: what a script sets between two epochs
(another transform, a probability in it, another ``collate_fn``) would reach neither.
"""

from __future__ import annotations

from multiprocessing.sharedctypes import Synchronized
from types import FunctionType, GenericAlias, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

DEPTH = 4
"""Objects in objects that are looked into."""
FEW = 64
"""Elements of a container up to which they are looked at."""
MOST = 4096
"""Values that are looked at, in all."""
_OPAQUE = (type, GenericAlias, ModuleType, FunctionType)
_PLAIN = (int, float, complex, str, bytes, type(None))

DatasetStamp = list[Any]


def stamp_of(dataset: Any) -> DatasetStamp:
    """Stamp what is set on a dataset, and on the datasets and transforms in it: numbers and words
    by value, tensors by their version, a `multiprocessing.Value` by what it holds, all else by
    identity and length.

    An element that is set in a long list or in an array is not seen.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3))
        >>> before = stamp_of(data)
        >>> same(before, stamp_of(data))
        True
        >>> _ = data.tensors[0].add_(1)
        >>> same(before, stamp_of(data))
        False
    """
    stamp: DatasetStamp = []
    _look(dataset, DEPTH, stamp)
    return stamp


def stamp_of_batches(loader: DataLoader[Any]) -> DatasetStamp:
    """Stamp what makes a loader's batches: its dataset and its ``collate_fn``."""
    return stamp_of(loader.dataset) + stamp_of(loader.collate_fn)


def attributes_of(dataset: Any) -> DatasetStamp:
    """Stamp what is set on a dataset itself: cheap enough for every sample.

    A class that notes things as it is read names the attributes that count, in ``STAMPED``.
    """
    own = getattr(dataset, "__dict__", {})
    counting = getattr(type(dataset), "STAMPED", None)
    return [*own.values()] if counting is None else [own.get(name) for name in counting]


def same(one: DatasetStamp, other: DatasetStamp) -> bool:
    """Whether two stamps are those of an unchanged dataset."""
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, _PLAIN):
        return type(one) is type(other) and (one == other or one != one)
    return one is other


def _look(value: Any, depth: int, stamp: DatasetStamp) -> None:
    stamp.append(value)  # not its id, which another object may get
    if not depth or len(stamp) > MOST or isinstance(value, (*_PLAIN, *_OPAQUE)):
        return
    if isinstance(value, Synchronized):
        stamp.append(value.get_obj().value)
        return
    if isinstance(value, torch.Tensor):
        stamp.append(0 if value.is_inference() else value._version)
        return
    inner: list[Any] = []
    if isinstance(value, list | tuple) or type(value) is dict:  # no Counter of what was read
        stamp.append(len(value))
        if len(value) <= FEW:
            inner = [*value.values()] if isinstance(value, dict) else [*value]
    for one in inner + attributes_of(value):
        _look(one, depth - 1, stamp)
