"""``prefetch()``: the user's ``DataLoader``, whose batches are there before they are asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ReferenceType, finalize, ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.data.loader_around import LoaderAround
from slipstream.data.own_iteration import iterates_itself
from slipstream.data.prefetch.device_copy import copied_ahead
from slipstream.data.prefetch.map_reader import MapReader
from slipstream.data.prefetch.stream_reader import StreamReader
from slipstream.errors import ModelError, UsageError
from slipstream.strategy import PrefetchConfig, Row

_STATE = ("state_dict", "load_state_dict")
_END = object()


def prefetch(
    loader: Iterable[Any],
    config: PrefetchConfig = PrefetchConfig(),  # noqa: B008 - frozen
    *,
    device: torch.device | None = None,
    cores: int | None = None,
    sharers: int = 1,
) -> PrefetchLoader:
    """Read the batches of a ``DataLoader`` ahead, across the borders of its epochs.

    Workers are started once. While an epoch ends they read the first batches of the next one, in
    the order that the loader would give it, with ``sampler.set_epoch(epoch + 1)`` foreseen.
    Iterate over the result as over the loader: each pass is an epoch.

    Args:
        loader: a ``DataLoader`` of torch; it is left as it is. Over an ``IterableDataset``, and
            where the loader keeps a state of its own (torchdata's ``StatefulDataLoader``), it has
            the workers that it asks for.
        config: how many workers or threads, and how far ahead.
        device: where the training computes; a CUDA device gets pinned memory and, with
            ``to_device``, copies on a stream of their own.
        cores: that workers may use; None: those of this process.
        sharers: ranks of this host, which read ahead in the same memory.

    Exactness: bitwise; the batches and their order are those of the loader. Random numbers that a
    dataset draws itself differ, as they do with another number of workers.

    Raises:
        ModelError: the loader is no ``DataLoader`` of torch, or keeps a state and has no workers.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.arange(4.0))
        >>> config = PrefetchConfig(threads=True, workers=1)
        >>> loader = prefetch(DataLoader(data, batch_size=2), config)
        >>> for epoch in range(2):
        ...     print([batch[0].tolist() for batch in loader])
        [[0.0, 1.0], [2.0, 3.0]]
        [[0.0, 1.0], [2.0, 3.0]]
        >>> loader.close()
    """
    return PrefetchLoader(loader, config, device=device, cores=cores, sharers=sharers)


def is_prefetchable(loader: Any, *, streams: bool = True) -> bool:
    """Whether `prefetch` takes it; without ``streams`` only where it sets how many workers read.

    Example:
        >>> is_prefetchable(DataLoader([1, 2])), is_prefetchable([1, 2])
        (True, False)
    """
    if not isinstance(loader, DataLoader) or _cannot_be_read(loader):
        return False
    if not streams:
        return not (isinstance(loader.dataset, IterableDataset) or hasattr(loader, "state_dict"))
    return not hasattr(loader, "state_dict") or loader.num_workers > 0


class PrefetchLoader(LoaderAround):
    """The result of `prefetch`. Attributes that it lacks are those of the loader, also when
    they are set.

    Leaving a loop early drops what was read of that pass, and an error ends the pass. A second
    iterator, while the first one is not over, reads for itself, as one of the loader does.

    Attributes:
        source: the loader.
    """

    _own = ("source",)

    def __init__(
        self,
        loader: Iterable[Any],
        config: PrefetchConfig,
        *,
        device: torch.device | None,
        cores: int | None,
        sharers: int,
    ) -> None:
        if not isinstance(loader, DataLoader) or _cannot_be_read(loader):
            raise ModelError(
                "data.prefetch reads a torch DataLoader ahead, that iterates as torch's does; the "
                f"loader is a {type(loader).__name__}: give a DataLoader, or leave data.prefetch "
                "out"
            )
        if config.to_device and hasattr(loader, "state_dict"):
            raise ModelError(
                f"data.prefetch.to_device: a {type(loader).__name__} keeps a state, which would be "
                "a batch ahead of the training; leave to_device out"
            )
        self.source = self._loader = loader
        cuda = device is not None and device.type == "cuda"
        self._device = device if cuda and config.to_device else None
        self._reader: MapReader | StreamReader
        if isinstance(loader.dataset, IterableDataset) or hasattr(loader, "state_dict"):
            self._reader = StreamReader(loader, config, pin=cuda)
        else:
            cores = cores or len(os.sched_getaffinity(0))
            self._reader = MapReader(loader, config, pin=cuda, cores=cores, sharers=sharers)
        self._running: ReferenceType[Iterator[Any]] | None = None
        self._delivered, self._waited = 0, 0.0
        finalize(self, self._reader.close)  # for loops of one's own, which may forget to

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in _STATE and hasattr(self._loader, name):
            return getattr(self._reader, name)
        return super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        running = None if self._running is None else self._running()
        if running is not None and _is_open(running) and not self._reader.gave_all:
            if isinstance(self._reader, StreamReader) and self._reader.keeps_state:
                raise UsageError(
                    "a second iterator over a loader that keeps a state, while the first is not "
                    "over; end the first one, or leave data.prefetch out"
                )
            return self._on_device(iter(self._loader))
        batches = self._reader.begin()
        if batches is None:
            return iter(())
        batches = self._timed(self._on_device(batches))
        self._running = ref(batches)
        return batches

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a prefetched loader has workers and threads, so it cannot be copied or pickled; copy "
            "the loader that prefetch() got"
        )

    def reading(self) -> dict[str, int]:
        """Figures for a trace: workers or threads that read beside the training, and batches that
        are there."""
        readers, queued = self._reader.reading
        return {"readers": readers, "queued": queued}

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside, batches are dropped as soon as they come, and say nothing of how long a step of
        the training takes."""
        self._reader.skips = True
        try:
            yield
        finally:
            self._reader.skips = False

    def close(self) -> None:
        """End workers and threads; a later pass starts them again. close() is idempotent."""
        self._reader.close()

    def report_rows(self) -> Sequence[Row]:
        """Report where batches are read, how far ahead, and how long the training waited for
        them."""
        notes = [self._reader.note] if self._reader.note else []
        if self._delivered:
            each = 1e3 * self._waited / self._delivered
            notes.insert(0, f"{each:.2f} ms of wait a batch")
        return [Row("prefetch", self._reader.value, "; ".join(notes))]

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self._device is None else copied_ahead(batches, self._device)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch = next(batches, _END)
            self._waited += time.perf_counter() - start
            if batch is _END:
                return
            self._delivered += 1
            yield batch


def _cannot_be_read(loader: DataLoader[Any]) -> bool:
    """Whether indices do not say what its batches are; one that keeps a state is iterated as it
    is."""
    return iterates_itself(loader) and not hasattr(loader, "state_dict")


def _is_open(batches: Iterator[Any]) -> bool:
    """Whether an iterator may still be asked for a batch."""
    return getattr(batches, "gi_frame", None) is not None
