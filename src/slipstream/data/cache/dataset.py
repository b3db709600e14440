"""Samples that were read once are kept, for later epochs and for the other ranks of the host.

On LMDB (`pip install 'slipstream[cache]'`): a file that processes map into memory. Readers never
wait, one process writes at a time, and a process that is killed leaves the file intact.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import tempfile
import weakref
from collections.abc import Sized
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.data.cache import store
from slipstream.data.cache.fingerprint import fingerprint, places
from slipstream.data.cache.store import SampleStore
from slipstream.data.pickled import pickled
from slipstream.data.stamp import attributes_of, same, stamp_of
from slipstream.errors import DataError, ModelError
from slipstream.strategy import CacheConfig, Row

FOLDER = "slipstream-samples"
LONGEST_NAME = 500  # bytes; LMDB takes 511


def cached(
    dataset: Dataset[Any],
    config: CacheConfig = CacheConfig(),  # noqa: B008 - frozen
    key: str = "",
) -> CachedDataset:
    """Keep the samples of a map-style dataset, as it gives them the first time.

    Args:
        dataset: gives the same sample each time it is asked for it; draw random numbers (for
            augmentations) from what it gives, not in it.
        config: where samples are kept, and how many bytes of them.
        key: what tells this dataset from others; empty: its class, its length, some samples,
            and the indices of each ``Subset`` in it.

    Exactness: bitwise.

    Raises:
        ModelError: lmdb is not installed, or the dataset has no length or no samples, or gives
            different samples for the same index, or is told its epoch.
        DataError: there is no room.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.arange(3))
        >>> kept = cached(data, CacheConfig(gigabytes=0.01))
        >>> kept[0], kept.report_rows()[0].value
        ((tensor(0),), '1 of 3 samples')
        >>> kept.close()
    """
    return CachedDataset(dataset, config, key)


def cached_loader(loader: Any, config: CacheConfig) -> tuple[DataLoader[Any], CachedDataset]:
    """A loader like another one, whose dataset keeps its samples; and that dataset.

    Raises:
        ModelError, DataError: as `cached`; or the loader is no ``DataLoader`` over a map-style
            dataset.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = type(getattr(loader, "dataset", loader)).__name__
        raise ModelError(
            f"data.cache keeps the samples of a map-style dataset in a torch DataLoader; this is a "
            f"{what}: give a DataLoader over a map-style dataset, or leave data.cache out"
        )
    dataset = cached(loader.dataset, config)
    other = copy.copy(loader)  # of its class, with its samplers
    other.__dict__.update(dataset=dataset, _iterator=None)  # a DataLoader refuses to be set these
    return other, dataset


class CachedDataset(Dataset[Any]):
    """The result of `cached`; attributes that it lacks are those of the dataset, also when
    they are set.

    Worker processes get a copy, which uses the same cache.
    """

    STAMPED = ("_dataset", "_closed")

    def __init__(self, dataset: Dataset[Any], config: CacheConfig, key: str = "") -> None:
        if find_spec("lmdb") is None:
            raise ModelError(
                "data.cache keeps samples in LMDB, which is not installed; pip install "
                "'slipstream[cache]'"
            )
        if not isinstance(dataset, Sized):
            raise ModelError(
                f"data.cache asks a dataset for samples by their index, and "
                f"{type(dataset).__name__} has no length; leave data.cache out"
            )
        if hasattr(dataset, "set_epoch"):
            raise ModelError(
                f"data.cache: {type(dataset).__name__} has set_epoch, so its samples change with "
                "the epoch; keep what it reads with slipstream.data.cache.cached(), or leave "
                "data.cache out"
            )
        if "/" in key:
            raise ModelError(f"data.cache: key {key!r}; allowed: a name without /")
        self._dataset: Any = dataset
        self._limit = int(config.gigabytes * 2**30)
        self._root = _root(config)
        # A larger limit would grow the file under those that have it open.
        self._path = self._root / f"{key or fingerprint(dataset)}-{_boot()}-{self._limit >> 20}M"
        self._store: SampleStore | None = None
        self._closed = False
        self._stamp = stamp_of(dataset)
        self._attributes = attributes_of(dataset)
        self._asked: set[Any] = set()
        self._end: weakref.finalize[Any, Any] | None = None
        self._open()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        # closed, or the one that this is a copy of
        left = self._closed or (self._end is not None and not self._end.alive)
        if left or not isinstance(index, int | str | np.integer):
            return self._dataset[index]
        number = index if isinstance(index, str) else int(index)
        kept_in, name = self._open(), repr(number).encode()
        if len(name) > LONGEST_NAME:
            name = hashlib.sha256(name).digest()
        kept = kept_in.get(name)
        self._watch(number, kept_in)
        if kept is not None:
            return pickle.loads(kept)
        sample = self._dataset[index]
        kept_in.put(name, sample)
        return sample

    def _watch(self, number: Any, kept_in: SampleStore) -> None:
        """Look whether the dataset was changed: at once where an attribute was set, else where an
        epoch begins, as a sample comes again.

        Raises:
            DataError: it gives another sample than the one that is kept.
        """
        attributes = attributes_of(self._dataset)
        begins = number in self._asked or not self._asked
        if not begins and same(attributes, self._attributes):
            self._asked.add(number)
            return
        self._asked, self._attributes = {number}, attributes
        stamp = stamp_of(self._dataset)
        if same(stamp, self._stamp):
            return
        for index in (number, *places(len(self))):
            kept = kept_in.get(repr(index).encode())
            if kept is not None and kept != pickled(self._dataset[index]):
                raise DataError(
                    f"data.cache: {type(self._dataset).__name__} was changed after sample {index} "
                    "was kept, which is another one now (an attribute was set, or a transform); "
                    "apply what changes to what slipstream.data.cache.cached() gives, or leave "
                    "data.cache out"
                )
        self._stamp = stamp

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or not hasattr(self._dataset, "__dict__"):  # a list takes none
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __copy__(self) -> CachedDataset:
        """A dataset of its own, and one user of the store with this one: either closes both."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _asked=set())
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_end": None, "_asked": set()}

    def close(self) -> None:
        """Leave the cache: from now on samples are read each time. In memory the last process
        removes what is kept. close() is idempotent."""
        if self._end is not None:
            self._end()
        self._store, self._closed = None, True

    def report_rows(self) -> list[Row]:
        """Report how many samples are kept, and where."""
        if self._store is None:
            return [Row("cache", "closed", "")]
        full = "; it is full: the others are read each time" if self._store.is_full else ""
        value = f"{self._store.count} of {len(self)} samples"
        return [Row("cache", value, f"in {self._root}{full}")]

    def _open(self) -> SampleStore:
        if self._store is None or self._store.pid != os.getpid():
            self._store = SampleStore.of(self._path, self._limit)
            if self._end is None:  # a forked process has that of its parent
                self._end = weakref.finalize(self, _leave, self._path)
        return self._store


def _leave(path: Path) -> None:
    """One user of a store less."""
    if (opened := store.opened(path)) is not None:
        opened.leave()


def _root(config: CacheConfig) -> Path:
    if config.folder is not None:
        return Path(config.folder) / FOLDER
    parent = store.MEMORY if config.to == "memory" else Path(tempfile.gettempdir())
    return parent / f"{FOLDER}-{os.getuid()}"


def _boot() -> str:
    """Tells this boot of the machine from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
