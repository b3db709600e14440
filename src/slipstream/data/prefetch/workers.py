"""Worker processes: torch's own, which outlive an epoch and say what they have come to."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from slipstream.data.pickled import pickled
from slipstream.data.prefetch.passes import Passes
from slipstream.data.prefetch.samples import few, named
from slipstream.data.prefetch.sources import Failed
from slipstream.errors import DataError
from slipstream.pytree import tensors

IN_MESSAGE = 1 << 20
"""Bytes of a batch up to which a worker sends it in its message. For each tensor in shared memory
the worker has to wake up again, and hand a file over."""
LOOK_SECONDS = 1.0
"""Between two looks at whether all workers live."""


class Workers:
    """Worker processes: torch's own, which live as long as this does.

    Args:
        loader: the user's; all but its indices and workers is kept.
        passes: the indices.
        count: of processes.
        each: batches that each reads ahead.
        pin: whether batches are copied to pinned memory.
        timeout: seconds to wait for a batch.
        seed: what the workers' random numbers start from.
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
        seed: int,
    ) -> None:
        batched = loader.batch_sampler is not None
        context = loader.multiprocessing_context or multiprocessing.get_context()
        counts = context.RawArray("L", count)
        pins = loader.pin_memory or pin
        indices: dict[str, Any] = {"batch_sampler": passes}
        if not batched:
            indices = {"sampler": passes, "batch_size": None}
        self._start = partial(
            with_workers,
            loader,
            named(loader.dataset),
            seed=seed,
            num_workers=count,
            prefetch_factor=each,
            pin_memory=pins,
            timeout=LOOK_SECONDS,
            collate_fn=WorkerCollate(loader.collate_fn, shares=pins, counts=counts),
            **indices,
        )
        self._loader: DataLoader[Any] | None = self._start()
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
                self._batches = self._resumed()
            batch = self._awaited(self._batches)
            self._taken += 1
            return unpacked(batch)
        except Exception as error:
            failure = None
            if self._passes.sent:
                awaited = f"samples {few(self._passes.sent[0].indices)} were awaited"
                failure = failure_of_workers(error, awaited)
            if failure is None:
                raise
        if not isinstance(failure, DataError):
            return Failed(failure)
        self.close()
        return Failed(failure, ended=True)

    def _resumed(self) -> Iterator[Any]:
        """For batches that were not sent yet; the workers stay, if all answer."""
        assert self._loader is not None
        self._counted, self._taken = list(self._counts), 0
        try:
            return begun(self._loader)
        except RuntimeError as error:
            if self._passes.sent or not str(error).startswith("DataLoader "):
                raise
        # One has died meanwhile, or is stopped. Out there, as the error holds torch's iterator.
        self._batches = None
        self._loader = self._start()
        return begun(self._loader)

    def _awaited(self, batches: Iterator[Any]) -> Any:
        """The next one; between two looks torch sees whether a worker has ended."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return next(batches)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
            if time.monotonic() > deadline:
                raise RuntimeError(f"DataLoader workers have sent no batch for {self._timeout:g} s")

    def close(self) -> None:
        self._batches = self._loader = None  # the end of their iterator stops the workers


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """``iter(loader)``, from a thread of its own.

    From the main thread torch would handle SIGCHLD, and raise wherever the training is when a
    worker dies; so it is an error of the batch that does not come. The device is that of the caller
    (torch pins memory for it).
    """
    outcome: list[Iterator[Any] | BaseException] = []
    pins = loader.pin_memory and torch.accelerator.is_available()
    device = torch.accelerator.current_device_index() if pins else None

    def begin() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            outcome.append(iter(loader))
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=begin, name="slipstream-data")
    thread.start()
    thread.join()
    made = outcome.pop()
    if not isinstance(made, BaseException):
        return made
    try:
        raise made
    finally:
        del made  # else the error holds itself, and torch's iterator


def failure_of_workers(error: Exception, awaited: str) -> Exception | None:
    """Find the error of torch's loader while something was awaited, to be raised in its place.

    None: nothing that workers have come to. One that a worker has caught, whose text has the
    worker's traceback, is that error without its own: this holds the error (in
    ``ExceptionWrapper.reraise``) and torch's iterator, with which the workers end. They end at once
    where it is let go; but where the garbage collector finds it in that circle their queues are
    closed first, and five seconds pass for each worker.
    """
    text = str(error).strip().partition("\n")[0]
    if "No space left on device" in str(error) and "shared memory" in str(error):
        return DataError(
            f"/dev/shm, through which workers hand batches over, is full while {awaited}; make it "
            "larger, read fewer batches ahead (data.prefetch.depth), or set data.prefetch.threads"
        )
    if "\nOriginal Traceback" in str(error):
        return error.with_traceback(None)
    if isinstance(error, OSError | EOFError):
        # One that dies takes the memory with it that it was about to hand over.
        text = f"DataLoader worker has ended ({error!r})"
    elif not (isinstance(error, RuntimeError) and text.startswith("DataLoader ")):
        return None
    return DataError(
        f"{text} while {awaited}; read the dataset alone in a script to see why, or raise "
        "data.prefetch.timeout where reading takes so long"
    )


def with_workers(
    loader: DataLoader[Any], dataset: Any, *, seed: int, **settings: Any
) -> DataLoader[Any]:
    """A loader like the user's, whose workers stay, with other settings."""
    kept: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        # of its own: what the workers start from is no draw of the user's
        "generator": torch.Generator().manual_seed(seed % 2**63),
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
    """Unpack what a worker made of samples."""
    return pickle.loads(batch.values) if isinstance(batch, _Message) else batch
