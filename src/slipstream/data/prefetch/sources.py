"""Readers of batches: worker processes, threads, or the process that trains.

All take the indices from one iterator, a bounded number of batches ahead, and give the batches back
in that order. They differ in nothing else.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from slipstream.data.prefetch.passes import Passes
from slipstream.data.prefetch.samples import SamplesOfBatches, few, named
from slipstream.errors import DataError
from slipstream.pytree import mapped


@dataclass(frozen=True, slots=True)
class Failed:
    """An error in the place of a batch."""

    error: Exception
    ended: bool = False
    """Whether the source has closed itself: nothing comes of what it was asked for."""


class Source(Protocol):
    """Batches in the order of the indices.

    Attributes:
        readers: workers or threads; 0: the training reads itself.
    """

    readers: int

    @property
    def queued(self) -> int:
        """Batches that were read and can be given out at once."""

    def __next__(self) -> Any:
        """The next batch, or how it `Failed`; StopIteration: all that was sent was given back."""

    def close(self) -> None:
        """End what reads."""


class Threads:
    """Threads of this process: nothing is copied, and no process is started.

    The dataset must allow several threads to read from it at once.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        passes: Passes,
        *,
        count: int,
        ahead: int,
        pin: bool,
        timeout: float,
    ) -> None:
        self.readers = count
        self._passes, self._ahead, self._timeout = passes, ahead, timeout
        self._futures: deque[Future[Any]] = deque()
        self._asked: _Asked = SimpleQueue()
        read = Reader(loader, pin)
        # A thread that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(
                target=_serve, args=(read, self._asked), name="slipstream-data", daemon=True
            )
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        return sum(1 for _ in takewhile(Future.done, self._futures))

    def __next__(self) -> Any:
        self._fill()
        if not self._futures:
            raise StopIteration
        future = self._futures.popleft()
        self._fill()
        try:
            error = future.exception(self._timeout)
        except TimeoutError:
            self.close()
            late = DataError(
                f"samples {few(self._passes.sent[0].indices)} were not read within "
                f"{self._timeout:g} s; see what they wait for, or raise data.prefetch.timeout"
            )
            return Failed(late, ended=True)
        return Failed(error) if isinstance(error, Exception) else future.result()

    def close(self) -> None:
        self._futures.clear()
        with suppress(Empty):
            while True:  # what nobody reads any more
                self._asked.get_nowait()
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(LEAVE_SECONDS)
        self._threads = []

    def _fill(self) -> None:
        while len(self._futures) < self._ahead:
            try:
                indices = next(self._passes)
            except StopIteration:
                return
            self._futures.append(Future())
            self._asked.put((indices, self._futures[-1]))


LEAVE_SECONDS = 1.0
"""How long a thread may take to end with the batch that it reads."""

_Asked = SimpleQueue[tuple[Any, Future[Any]] | None]


def _serve(read: Reader, asked: _Asked) -> None:
    """Read what is asked for, until that is None."""
    while (asks := asked.get()) is not None:
        indices, future = asks
        try:
            future.set_result(read(indices))
        except BaseException as error:
            future.set_exception(error)


class Inline:
    """The process that trains, when it asks.

    It reads from a copy of the dataset: workers that are forked later must not share a file that a
    dataset opens when it is first read from.
    """

    readers = queued = 0

    def __init__(self, loader: DataLoader[Any], passes: Passes, *, pin: bool) -> None:
        self._read, self._passes = Reader(loader, pin, _copied(loader.dataset)), passes

    def __next__(self) -> Any:
        indices = next(self._passes)
        try:
            return self._read(indices)
        except Exception as error:
            return Failed(error)

    def close(self) -> None:
        """Nothing runs."""


def _copied(dataset: Any) -> Any:
    """A copy, with copies of the datasets in it (of a ``Subset``, a ``ConcatDataset``)."""
    try:
        copied = copy.copy(dataset)
        for name, value in vars(dataset).items():
            if isinstance(value, Dataset):
                setattr(copied, name, _copied(value))
            elif isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):
                setattr(copied, name, type(value)(map(_copied, value)))
    except Exception:  # of a class that cannot be copied
        return dataset
    return copied


class Reader:
    """Reads the samples of a batch and puts them together, as torch's loader does."""

    def __init__(self, loader: DataLoader[Any], pin: bool, dataset: Any = None) -> None:
        self._batched = loader.batch_sampler is not None
        self._samples = named(loader.dataset if dataset is None else dataset)
        self._collate = loader.collate_fn
        self._pin = (loader.pin_memory or pin) and torch.cuda.is_available()

    def __call__(self, indices: Any) -> Any:
        if self._batched and isinstance(self._samples, SamplesOfBatches):
            samples = self._samples.__getitems__(indices)
        elif self._batched:
            samples = [self._samples[index] for index in indices]
        else:
            samples = self._samples[indices]
        batch = self._collate(samples)
        if not self._pin:
            return batch
        if hasattr(batch, "pin_memory") and not isinstance(batch, torch.Tensor):
            return batch.pin_memory()  # of a class of the user's
        return mapped(batch, _pinned)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
