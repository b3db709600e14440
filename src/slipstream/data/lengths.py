"""Loaders whose number of batches is a fact; of all others ``len()`` is a hint.

A stream may say one thing and give another: an ``IterableDataset`` with several workers, a sampler
or a loader of the user's. What torch's own samplers give is settled when a pass begins.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from slipstream.data.balance.loader import BalancedLoader
from slipstream.data.own_iteration import iterates_itself
from slipstream.data.prefetch.loader import PrefetchLoader
from slipstream.data.prefetch.samplers import FORESEEN, counts_epochs, samplers_of

_IN_MEMORY = (list, tuple, range)


def certain_length(loader: Any) -> int | None:
    """The number of batches of the pass that has begun; None: it is not known for certain.

    Example:
        >>> certain_length([1, 2]), certain_length(DataLoader([1, 2, 3], batch_size=2))
        (2, 2)
        >>> certain_length(iter([1, 2])) is None
        True
    """
    if isinstance(loader, BalancedLoader):
        return len(loader)
    if isinstance(loader, PrefetchLoader):
        loader = loader.source
    if type(loader) in _IN_MEMORY or (isinstance(loader, DataLoader) and _is_plain(loader)):
        return len(loader)
    return None


def epoch_of(loader: Any) -> int | None:
    """The epoch to which a loader, its sampler or its dataset is set; None: none counts any.

    Where several count, a script may tell the epoch to one alone: it is the first that is above 0.

    Example:
        >>> epoch_of([1, 2]) is None
        True
    """
    parts = (
        getattr(loader, "sampler", None),
        *samplers_of(loader),
        loader,
        getattr(loader, "dataset", None),
    )
    epochs = [int(part.epoch) for part in parts if counts_epochs(part)]
    return next(filter(None, epochs), 0) if epochs else None


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether it gives what torch's samplers say, of a dataset that is asked by index."""
    own = iterates_itself(loader) or type(loader).__len__ is not DataLoader.__len__
    if own or isinstance(loader.dataset, IterableDataset):
        return False
    return all(type(one) in (*FORESEEN, *_IN_MEMORY) for one in samplers_of(loader))
