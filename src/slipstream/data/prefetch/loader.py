"""``prefetch()``: the user's ``DataLoader``, whose batches are there before they are asked for."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.data.prefetch.device_copy import copied_ahead
from slipstream.data.prefetch.passes import Batch, Passes
from slipstream.data.prefetch.sources import Inline, Source, Threads, Workers
from slipstream.errors import DataError, ModelError
from slipstream.pytree import mapped
from slipstream.strategy import Prefetch, Row

MEASURED = 4
"""Batches that this process reads itself, to see how long that takes."""
SPARE = 1.5
"""Workers that are started for each that is needed on average."""
EACH = 2
"""Batches that a worker reads ahead, where memory allows it."""
SHARE = 0.5
"""The part of free memory that batches read ahead may take."""
SHARED_MEMORY = Path("/dev/shm")


def prefetch(
    loader: DataLoader[Any],
    config: Prefetch = Prefetch(),  # noqa: B008 - frozen
    *,
    device: torch.device | None = None,
    cores: int | None = None,
) -> PrefetchLoader:
    """Read the batches of a ``DataLoader`` ahead, across the borders of its epochs.

    Workers are started once. While an epoch ends they read the first batches of the next one, in
    the order that the loader would give it, with ``sampler.set_epoch(epoch + 1)`` foreseen.
    Iterate over the result as over the loader: each pass is an epoch.

    Args:
        loader: over a map-style dataset; it is left as it is.
        config: how many workers or threads, and how far ahead.
        device: where the training computes; a CUDA device gets pinned memory and, with
            ``to_device``, copies on a stream of their own.
        cores: that workers may use; None: those of this process.

    Exactness: bitwise; the batches and their order are those of the loader. Random numbers that a
    dataset draws itself differ, as they do with another number of workers.

    Raises:
        ModelError: the loader is not a ``DataLoader`` of torch over a map-style dataset.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.arange(4.0))
        >>> loader = prefetch(DataLoader(data, batch_size=2), Prefetch(threads=True, workers=1))
        >>> for epoch in range(2):
        ...     print([batch[0].tolist() for batch in loader])
        [[0.0, 1.0], [2.0, 3.0]]
        [[0.0, 1.0], [2.0, 3.0]]
        >>> loader.close()
    """
    return PrefetchLoader(loader, config, device=device, cores=cores)


class PrefetchLoader:
    """What `prefetch` returns. Attributes that it lacks are those of the loader.

    Leaving a loop early drops what was read of that pass. A second iterator, while the first one is
    not over, reads for itself, as one of the loader does.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        config: Prefetch,
        *,
        device: torch.device | None,
        cores: int | None,
    ) -> None:
        _check(loader)
        self._loader, self._config = loader, config
        self._device = device if device is not None and device.type == "cuda" else None
        self._cores = cores or len(os.sched_getaffinity(0))
        self._passes, self._timing = Passes(loader), _Timing()
        self._source: Source | None = None
        self._choice = ""
        self._running: ReferenceType[Iterator[Any]] | None = None
        self._delivered, self._waited = 0, 0.0

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if (running := self._running and self._running()) is not None and _is_open(running):
            return iter(self._loader)
        number = self._passes.begin()
        batches = self._pass(number) if number is not None else iter(())
        if self._device is not None and self._config.to_device:
            batches = copied_ahead(batches, self._device)
        self._running = ref(batches) if number is not None else None
        return batches

    def close(self) -> None:
        """End workers and threads; a later pass starts them again. close() is idempotent."""
        if self._source is not None:
            self._source.close()
            self._source = None
            self._passes = Passes(self._loader)

    def report_rows(self) -> Sequence[Row]:
        """Where batches are read, how far ahead, and how long the training waited for them."""
        if not self._delivered:
            return [Row("prefetch", self._choice or "not begun", "")]
        each = f"{1e3 * self._waited / self._delivered:.2f} ms of wait a batch"
        border = "" if self._passes.ahead else "; not across epochs: " + _UNFORESEEN
        return [Row("prefetch", self._choice, each + border)]

    def _pass(self, number: int) -> Iterator[Any]:
        last = False
        while not last:
            batch, sent = self._next()
            if sent.number == number:  # else of a pass that was left early
                self._delivered += 1
                last = sent.last
                yield batch
        self._passes.end()

    def _next(self) -> tuple[Any, Batch]:
        """The next batch that was sent for, and what was asked."""
        if self._source is None:
            self._source = self._first_source()
        elif isinstance(self._source, Inline) and self._timing.is_known:
            self._source = self._chosen_source()
        start = time.perf_counter()
        try:
            batch = next(self._source)
        except BaseException:
            self.close()
            raise
        end = time.perf_counter()
        self._waited += end - start
        if isinstance(self._source, Inline):
            self._timing.add(start, end, _num_bytes(batch))
        return batch, self._passes.received()

    def _first_source(self) -> Source:
        if self._config.workers == "auto":
            self._choice = "measuring"
            return Inline(self._loader, self._passes, pin=self._device is not None)
        return self._started(self._config.workers)

    def _chosen_source(self) -> Source:
        """As many workers as reading takes of computing."""
        needed = SPARE * self._timing.read / max(self._timing.step, 1e-9)
        return self._started(max(1, min(math.ceil(needed), self._cores)))

    def _started(self, count: int) -> Source:
        pin, timeout = self._device is not None, self._config.timeout
        ahead = self._ahead(count)
        if self._config.threads:
            self._choice = f"{count} thread{'s' * (count > 1)}, {ahead} batches ahead"
            options: dict[str, Any] = {"pin": pin, "timeout": timeout}
            return Threads(self._loader, self._passes, count=count, ahead=ahead, **options)
        each = max(1, ahead // count)
        self._choice = f"{count} worker{'s' * (count > 1)}, {each * count} batches ahead"
        return Workers(self._loader, self._passes, count=count, each=each, pin=pin, timeout=timeout)

    def _ahead(self, count: int) -> int:
        """Batches to read ahead, within memory."""
        ahead = EACH * count if self._config.depth == "auto" else self._config.depth
        size = self._timing.num_bytes
        if self._config.depth != "auto" or not size or self._config.threads:
            return ahead
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        if free and size > free:
            raise DataError(
                f"a batch has {size / 2**20:.0f} MiB, {SHARED_MEMORY} has "
                f"{free / 2**20:.0f} MiB free, through which workers hand batches over; make it "
                "larger, or set data.prefetch.threads"
            )
        return max(count, min(ahead, int(SHARE * free / size))) if free else ahead


_UNFORESEEN = (
    "their order is drawn from random numbers that the training draws, too; give the DataLoader a "
    "generator of its own"
)


class _Timing:
    """How long this process takes to read a batch, and to use it."""

    def __init__(self) -> None:
        self._reads: list[float] = []
        self._steps: list[float] = []
        self._ended: float | None = None
        self.num_bytes = 0

    def add(self, start: float, end: float, num_bytes: int) -> None:
        """A batch was read."""
        if self._ended is not None:
            self._steps.append(start - self._ended)
        self._reads.append(end - start)
        self._ended = end
        self.num_bytes = max(self.num_bytes, num_bytes)

    @property
    def is_known(self) -> bool:
        return len(self._reads) >= MEASURED

    @property
    def read(self) -> float:
        return median(self._reads)

    @property
    def step(self) -> float:
        """The fastest: the first steps of a training allocate, compile and warm up."""
        return min(self._steps)


def _is_open(batches: Iterator[Any]) -> bool:
    """Whether an iterator may still be asked for a batch."""
    return getattr(batches, "gi_frame", None) is not None


def _num_bytes(batch: Any) -> int:
    sizes: list[int] = []
    mapped(batch, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def is_prefetchable(loader: Any) -> bool:
    """Whether `prefetch` takes it.

    Example:
        >>> is_prefetchable(DataLoader([1, 2])), is_prefetchable([1, 2])
        (True, False)
    """
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ModelError(
            f"data.prefetch reads a torch DataLoader ahead; the loader is a "
            f"{type(loader).__name__}: give a DataLoader, or leave data.prefetch out"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ModelError(
            f"data.prefetch asks a dataset for samples by their index, and "
            f"{type(loader.dataset).__name__} is an IterableDataset; use "
            "DataLoader(..., num_workers=..., persistent_workers=True), and leave data.prefetch out"
        )
