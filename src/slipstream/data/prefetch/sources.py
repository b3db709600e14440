"""Where batches are read: worker processes, threads, or the process that trains.

All take the indices from one iterator, a bounded number of batches ahead, and give the batches back
in that order. They differ in nothing else.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from slipstream.data.pickled import pickled
from slipstream.data.prefetch.passes import Passes
from slipstream.errors import DataError
from slipstream.pytree import mapped, tensors

IN_MESSAGE = 1 << 20
"""Bytes of a batch up to which a worker sends it in its message. For each tensor in shared memory
the worker has to wake up again, and hand a file over."""
NO_ROOM = "/dev/shm, through which workers hand batches over, is full"


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
        """The next batch; StopIteration: all that was sent was given back."""

    def close(self) -> None:
        """End what reads."""


class Samples(Dataset[Any]):
    """A dataset whose errors name the sample; attributes are those of the user's dataset.

    Make it by `named`.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"while sample {index} of the dataset was read")
            raise

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        # pickle asks before there is a dataset; torch would read batches past `__getitem__`
        if name in ("_dataset", "__getitems__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class SamplesOfBatches(Samples):
    """One that reads all samples of a batch at once, as those of ``datasets`` do."""

    def __getitems__(self, indices: Any) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            error.add_note(f"while samples {_few(indices)} of the dataset were read at once")
            raise


def named(dataset: Any) -> Samples:
    """A dataset whose errors name the sample, or those of the batch if it reads them at once."""
    read = dataset
    while type(read) is Subset:  # reads at once if what it is a part of does
        read = read.dataset
    return SamplesOfBatches(dataset) if hasattr(read, "__getitems__") else Samples(dataset)


def with_workers(loader: DataLoader[Any], dataset: Any, **settings: Any) -> DataLoader[Any]:
    """A loader like the user's, whose workers stay, with other settings."""
    kept: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        # of its own: what the workers start from is no draw of the user's
        "generator": torch.Generator().manual_seed(torch.initial_seed() % 2**63),
        "persistent_workers": True,
    }
    return DataLoader(dataset, **kept | settings)


class WorkerCollate:
    """Puts the samples of a batch together in a worker.

    Args:
        collate: the user's.
        shares: whether all batches go through shared memory, as those do that are pinned.
        counts: of the batches of each worker, in shared memory; None: nobody asks.
    """

    def __init__(self, collate: Any, *, shares: bool, counts: Any = None) -> None:
        self._collate, self._counts, self._shares = collate, counts, shares

    def __call__(self, samples: Any) -> Any:
        batch, worker = self._collate(samples), get_worker_info()
        if not self._shares:
            with suppress(Exception):  # of a class that only torch's queue can send
                batch = _in_message(batch)
        if worker is not None and self._counts is not None:
            self._counts[worker.id] += 1  # nobody else writes there
        return batch


@dataclass(frozen=True)
class _Message:
    """A batch in the message itself."""

    values: bytes


def _in_message(batch: Any) -> Any:
    """A small batch as a message; others, and those whose values lie in another order in memory,
    as they are."""
    found = list(tensors(batch))
    if not found or not all(tensor.is_contiguous() for tensor in found):
        return batch
    if sum(tensor.nbytes for tensor in found) > IN_MESSAGE:
        return batch
    values = pickled(batch)
    return _Message(values) if len(values) < 2 * IN_MESSAGE else batch


def unpacked(batch: Any) -> Any:
    """What a worker made of samples."""
    return pickle.loads(batch.values) if isinstance(batch, _Message) else batch


class Workers:
    """Worker processes: torch's own, which live as long as this does.

    Args:
        loader: the user's; all but its indices and workers is kept.
        passes: the indices.
        count: of processes.
        each: batches that each reads ahead.
        pin: whether batches are copied to pinned memory.
        timeout: seconds to wait for a batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        passes: Passes,
        *,
        count: int,
        each: int,
        pin: bool,
        timeout: float,
    ) -> None:
        batched = loader.batch_sampler is not None
        context = loader.multiprocessing_context or multiprocessing.get_context()
        counts = context.RawArray("L", count)
        pins = loader.pin_memory or pin
        indices: dict[str, Any] = {"batch_sampler": passes}
        if not batched:
            indices = {"sampler": passes, "batch_size": None}
        self._loader: DataLoader[Any] | None = with_workers(
            loader,
            named(loader.dataset),
            num_workers=count,
            prefetch_factor=each,
            pin_memory=pins,
            timeout=timeout,
            collate_fn=WorkerCollate(loader.collate_fn, shares=pins, counts=counts),
            **indices,
        )
        self.readers, self._counts, self._taken = count, counts, 0
        self._counted = [0] * count
        self._passes, self._timeout = passes, timeout
        self._batches: Iterator[Any] | None = None

    @property
    def queued(self) -> int:
        """Counted where they are put together, so one may still be on its way. Torch asks the
        workers in turn."""
        made = [now - before for now, before in zip(self._counts, self._counted, strict=True)]
        number = self._taken
        while made[number % self.readers] > number // self.readers:
            number += 1
        return number - self._taken

    def __next__(self) -> Any:
        try:
            if self._batches is None or not self._passes.sent:
                assert self._loader is not None
                self._counted, self._taken = list(self._counts), 0
                self._batches = iter(self._loader)  # the workers stay
            batch = next(self._batches)
            self._taken += 1
            return unpacked(batch)
        except (RuntimeError, OSError, EOFError) as error:
            what = _of_workers(error)
            if not what or not self._passes.sent:
                raise
            awaited = _few(self._passes.sent[0].indices)
            self.close()
            if what == NO_ROOM:
                raise DataError(
                    f"{NO_ROOM} while samples {awaited} were awaited; make it larger, read fewer "
                    "batches ahead (data.prefetch.depth), or set data.prefetch.threads"
                ) from error.with_traceback(None)
            raise DataError(
                f"{what} while samples {awaited} were awaited; read them in a script of their own "
                "to see why, or raise data.prefetch.timeout where reading takes so long"
            ) from error.with_traceback(None)  # it holds the iterator, whose end stops the workers

    def close(self) -> None:
        self._batches = self._loader = None  # the end of their iterator stops the workers


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
            return future.result(self._timeout)
        except TimeoutError as error:
            if future.done():  # the dataset's own, or it has come just now
                return future.result()
            awaited = _few(self._passes.sent[0].indices)
            self.close()
            raise DataError(
                f"samples {awaited} were not read within {self._timeout:g} s; see what they wait "
                "for, or raise data.prefetch.timeout"
            ) from error

    def close(self) -> None:
        self._futures.clear()
        while not self._asked.empty():  # what nobody reads any more
            self._asked.get()
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
        dataset: Any = loader.dataset
        with suppress(Exception):  # of a class that cannot be copied
            dataset = copy.copy(dataset)
        self._read, self._passes = Reader(loader, pin, dataset), passes

    def __next__(self) -> Any:
        return self._read(next(self._passes))

    def close(self) -> None:
        """Nothing runs."""


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
        return mapped(batch, _pinned) if self._pin else batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _of_workers(error: Exception) -> str:
    """What the workers have come to; empty: the error is the dataset's."""
    if "No space left on device" in str(error) and "shared memory" in str(error):
        return NO_ROOM
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, RuntimeError):
        return text if text.startswith("DataLoader ") else ""
    # One that dies takes the memory with it that it was about to hand over.
    return "" if text.startswith("Caught ") else f"DataLoader worker has ended ({error!r})"


def _few(indices: Any) -> str:
    """The first of a batch's indices."""
    listed = indices if isinstance(indices, list | tuple) else [indices]
    return ", ".join(map(str, listed[:8])) + ", ..." * (len(listed) > 8)
