"""Known samplers: when they draw, and whether their order is another one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slipstream.data.balance import BalancedBatches

FORESEEN = (
    BalancedBatches,
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Classes of samplers whose order depends on their attributes and their generator alone."""


_SAMPLERS = 8
"""One in another that are looked at: an object may answer every name with itself."""


def samplers_of(loader: Any) -> list[Any]:
    """List what draws a loader's batches, the outermost first: its batch sampler, or its sampler
    where it has none, and what that draws from.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> inner = SequentialSampler([1, 2, 3])
        >>> rows = BatchSampler(inner, 2, drop_last=False)
        >>> samplers_of(DataLoader([1, 2, 3], sampler=rows, batch_size=None)) == [rows, inner]
        True
    """
    outer = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None) if outer is None else outer]
    while found[-1] is not None and len(found) < _SAMPLERS:
        found.append(getattr(found[-1], "sampler", None))
    return [one for one in found if one is not None]


def draws_in_between(sampler: Any) -> bool:
    """Whether one of FORESEEN draws from its generator between two of its samples."""
    if type(sampler) is not RandomSampler:
        return False
    return sampler.replacement or sampler.num_samples > len(sampler.data_source)


def counts_epochs(sampler: Any) -> bool:
    """Whether a training tells it the epoch, and it tells which one it is at."""
    counts = isinstance(getattr(sampler, "epoch", None), int)
    return counts and callable(getattr(sampler, "set_epoch", None))


def settings_of(sampler: Any) -> tuple[Any, ...]:
    """Collect what tells whether anything but the place was set on it."""
    return tuple(
        _identity(value) if name in ("data_source", "dataset") else _value(value)
        for name, value in getattr(sampler, "__dict__", {}).items()
        if name.lstrip("_") not in ("epoch", "first", "begun")
    )


def _value(value: Any) -> Any:
    """Numbers, and by their hash sequences of them: they may be changed in place."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return value.shape, hash(value.tobytes())
    if isinstance(value, list | tuple | range):
        with suppress(TypeError):  # of elements without a hash
            return len(value), hash(tuple(value))
    return _identity(value)


def _identity(value: Any) -> tuple[int, int | None]:
    return id(value), len(value) if hasattr(value, "__len__") else None
