"""Reads a stream: an ``IterableDataset``, or a loader that keeps a state of its own.

What comes next only the loader knows, so it is iterated as it is, by a thread that waits for its
workers. Of an ``IterableDataset`` the next epoch begins as soon as the last batch of this one was
read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterDataPipe

from slipstream.data.prefetch.samples import named
from slipstream.data.prefetch.sources import LEAVE_SECONDS
from slipstream.data.prefetch.workers import (
    WorkerCollate,
    begun,
    failure_of_workers,
    unpacked,
    with_workers,
)
from slipstream.data.stamp import DatasetStamp, same, stamp_of_batches
from slipstream.errors import DataError, ModelError, UsageError
from slipstream.strategy import PrefetchConfig

LOOK_SECONDS = 0.1
"""Between two looks at whether the reader is still wanted."""


class StreamReader:
    """Batches of one pass after the other.

    ``gave_all`` is never known of a stream.

    Args:
        loader: over an ``IterableDataset``, or with a ``state_dict``.
        config: how far ahead.
        pin: whether batches are copied to pinned memory.

    Raises:
        ModelError: the loader keeps a state and has no workers.

    Attributes:
        value: where batches are read and how far ahead, in words.
        note: why batches are not read across epochs; empty: they are.
    """

    gave_all = skips = False

    def __init__(self, loader: DataLoader[Any], config: PrefetchConfig, *, pin: bool) -> None:
        self.keeps_state = hasattr(loader, "state_dict")
        if self.keeps_state and not loader.num_workers:
            raise ModelError(
                f"a {type(loader).__name__} without workers reads in the thread that trains; give "
                "it num_workers of 1 or more, or leave data.prefetch out"
            )
        self._given, self._config, self._pin = loader, config, pin
        self._count = max(loader.num_workers, 1)  # another number deals the stream out otherwise
        self._depth = 2 * self._count if config.depth == "auto" else config.depth
        self._loader: DataLoader[Any] | None = None
        self._reading: _Reading | None = None
        self._stamp: DatasetStamp = []
        self._passes, self._state, self._seed = 0, None, torch.initial_seed()
        self.value = f"{self._count} worker{'s' * (self._count > 1)}, {self._depth} batches ahead"
        self.note = ""
        has_epochs = hasattr(loader.dataset, "set_epoch")
        self._starts_anew = has_epochs and not loader.persistent_workers
        if self.keeps_state:
            self.note = "not across epochs: the loader keeps a state of its own"
        elif has_epochs:
            self.note = "not across epochs: the dataset has set_epoch"
        elif isinstance(loader.dataset, IterDataPipe):
            self.note = "not across epochs: ranks agree on a seed when one begins"

    @property
    def reading(self) -> tuple[int, int]:
        """Workers that read beside the training, and batches that are there."""
        return self._count, 0 if self._reading is None else self._reading.queued

    def begin(self) -> Iterator[Any]:
        """The next pass."""
        reading, self._reading = self._reading, None
        if reading is not None and reading.begun:  # left early
            reading.stop(self._config.timeout)
            reading = None
        if self._starts_anew or self._is_stale():  # workers have a copy of the dataset
            self._loader = None
            if reading is not None:  # read ahead from what it was
                reading.stop(self._config.timeout)
                reading = None
        if not self.keeps_state:
            self._draw_seed()
        self._passes += 1
        self._reading = reading or self._new()
        self._reading.begun = True
        return self._pass(self._reading)

    def _is_stale(self) -> bool:
        """Whether the dataset or the ``collate_fn`` was changed since workers got it, where those
        of the user's own loader would get it anew."""
        own = self._given.num_workers > 0 and self._given.persistent_workers
        if own or self.keeps_state or self._loader is None:
            return False
        return not same(self._stamp, stamp_of_batches(self._given))

    def close(self) -> None:
        """End thread and workers."""
        reading, self._reading = self._reading, None
        self._loader = None  # the end of their iterator stops the workers
        if reading is not None:
            reading.stop(LEAVE_SECONDS, must_end=False)

    def state_dict(self) -> Any:
        """The loader's state after the last batch that was given out."""
        loader: Any = self._given
        return loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Go on where a state was taken; what was read ahead is dropped."""
        self.close()
        self._state = None
        loader: Any = self._given
        loader.load_state_dict(state)

    def _pass(self, reading: _Reading) -> Iterator[Any]:
        try:
            for read in reading.batches(self._config.timeout):
                self._state = read.state
                if reading.is_over and self._reading is reading and not self.note:
                    self._reading = self._new()
                if not read.ended:
                    yield read.batch
        except GeneratorExit:
            raise
        except BaseException:
            self.close()
            raise
        if self._reading is reading:
            self._reading = None

    def _new(self) -> _Reading:
        if self._loader is None:
            self._stamp = stamp_of_batches(self._given)
            self._loader = self._given if self.keeps_state else self._with_workers()
        loader: Any = self._loader
        state_of = loader.state_dict if self.keeps_state else None
        return _Reading(begun(loader), state_of, self._depth)

    def _with_workers(self) -> DataLoader[Any]:
        given = self._given
        pins = given.pin_memory or self._pin
        return with_workers(
            given,
            named(given.dataset),
            seed=self._seed + self._passes,
            num_workers=self._count,
            prefetch_factor=given.prefetch_factor,
            pin_memory=pins,
            collate_fn=WorkerCollate(given.collate_fn, shares=pins),
            timeout=given.timeout,
            batch_size=given.batch_size,
            drop_last=given.drop_last,
        )

    def _draw_seed(self) -> None:
        """Draw as iter() of the user's loader does, for its workers."""
        if not self._passes or not (self._given.num_workers and self._given.persistent_workers):
            seed = torch.empty((), dtype=torch.int64).random_(generator=self._given.generator)
            self._seed = int(seed)


class _Read(NamedTuple):
    """A batch and the loader's state after it; or how the reading ended."""

    batch: Any = None
    state: Any = None
    ended: bool = False
    error: Exception | None = None


class _Reading:
    """One pass, read by a thread into a queue.

    Attributes:
        begun: whether the training takes its batches.
        is_over: whether all of it was read.
    """

    def __init__(
        self, batches: Iterator[Any], state_of: Callable[[], Any] | None, depth: int
    ) -> None:
        self._state_of, self._number, self._taken = state_of, 0, 0
        self._queue: Queue[_Read] = Queue(depth)
        self._stopped = threading.Event()
        self.begun = self.is_over = False
        # The thread alone holds the iterator: with it the workers end.
        self._thread = threading.Thread(
            target=self._read, args=(batches,), name="slipstream-data", daemon=True
        )
        self._thread.start()

    @property
    def queued(self) -> int:
        """Batches that were read and not taken yet."""
        return self._number - self._taken

    def batches(self, timeout: float) -> Iterator[_Read]:
        """The batches, and at last that there are no more.

        Raises:
            DataError: none has come in that time.
            UsageError: it was stopped meanwhile.
            Exception: that of the loader.
        """
        while True:
            read = self._next(timeout)
            if read.error is not None:
                try:
                    raise read.error
                finally:
                    del read  # else the error holds itself
            self._taken += not read.ended
            yield read
            if read.ended:
                return

    def _next(self, timeout: float) -> _Read:
        deadline = time.monotonic() + timeout
        while not self._stopped.is_set():
            try:
                return self._queue.get(timeout=LOOK_SECONDS)
            except Empty:
                if time.monotonic() > deadline:
                    self._stopped.set()
                    raise DataError(
                        f"no batch has come for {timeout:g} s; see what the dataset waits for, or "
                        "raise data.prefetch.timeout"
                    ) from None
        raise UsageError("the loader was closed while it was iterated over")

    def stop(self, timeout: float, must_end: bool = True) -> None:
        """Read no further.

        Raises:
            DataError: the batch that is being read does not come, and must.
        """
        self._stopped.set()
        self._thread.join(timeout)
        if must_end and self._thread.is_alive():
            raise DataError(
                f"no batch has come for {timeout:g} s while an epoch was left; see what the "
                "dataset waits for, or raise data.prefetch.timeout"
            )

    def _read(self, batches: Iterator[Any]) -> None:
        try:
            for batch in batches:
                state = self._state_of() if self._state_of is not None else None
                if not self._put(_Read(unpacked(batch), state)):
                    return
                self._number += 1
            self.is_over = True
            state = self._state_of() if self._state_of is not None else None
            self._put(_Read(state=state, ended=True))
        except Exception as error:
            self._put(_Read(error=self._explained(error)))

    def _explained(self, error: Exception) -> Exception:
        awaited = f"batch {self._number} of the pass, counted from 0, was awaited"
        failure = failure_of_workers(error, awaited) or error
        if not isinstance(failure, DataError):
            failure.add_note(f"while {awaited}")
        return failure

    def _put(self, read: _Read) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(read, timeout=LOOK_SECONDS)
            except Full:
                continue
            return True
        return False
