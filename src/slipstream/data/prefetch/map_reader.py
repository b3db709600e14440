"""Reads a map-style dataset: what is read next is known, so epochs need no border."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from slipstream.data.prefetch.passes import Batch, Passes
from slipstream.data.prefetch.sources import Failed, Inline, Source, Threads
from slipstream.data.prefetch.workers import Workers
from slipstream.data.stamp import DatasetStamp, same, stamp_of_batches
from slipstream.errors import DataError, ModelError, UsageError
from slipstream.memory.offload.free_space import free_host_bytes
from slipstream.pytree import tensors
from slipstream.strategy import PrefetchConfig

MEASURED = 8
"""Batches that this process reads itself, to see how long that takes; the later half counts."""
SEEN = 16
"""Steps with batches of workers, the latest ones, that are compared with as many without."""
WAITED = 0.25
"""That comparison is made if a batch is waited for longer than this part of what reading takes."""
SPARE = 1.5
"""Workers that are started for each that is needed on average."""
CLEARLY = 1.05
"""Workers end if steps with their batches take so many times as long as others: less may be
chance."""
EACH = 2
"""Batches that a worker reads ahead, where memory allows it."""
SHARE = 0.5
"""The part of free memory that batches read ahead may take, those of all ranks of the host."""
SHARED_MEMORY = Path("/dev/shm")


class MapReader:
    """Batches of one pass after the other.

    Args:
        loader: over a map-style dataset.
        config: how many workers or threads, and how far ahead.
        pin: whether batches are copied to pinned memory.
        cores: most workers.
        sharers: ranks of this host.

    Raises:
        ModelError: the loader prepares its workers, and there are to be threads.

    Attributes:
        value: where batches are read and how far ahead, in words.
        gave_all: whether the present pass has given its last batch.
        skips: whether batches are dropped as soon as they come, which is no step to measure.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        config: PrefetchConfig,
        *,
        pin: bool,
        cores: int,
        sharers: int,
    ) -> None:
        self._loader, self._config, self._pin = loader, config, pin
        self._cores, self._sharers = cores, sharers
        if config.threads and loader.worker_init_fn is not None:
            raise ModelError(
                "data.prefetch.threads: the loader has a worker_init_fn, which prepares worker "
                "processes; use workers, or leave worker_init_fn out"
            )
        self._threads = config.threads
        self._timing = _Timing()
        self._source: Source | None = None
        self._stamp: DatasetStamp = []
        """Of what the source reads."""
        self._starts = 0
        self._reads_itself = self._is_judging = self._is_judged = False
        self.value, self.gave_all, self.skips = "not begun", False, False
        # Workers have a copy of the dataset: what is set on it between epochs must reach them.
        self._has_epochs = hasattr(loader.dataset, "set_epoch")
        self._starts_anew = self._has_epochs and not loader.persistent_workers
        self._passes = self._new_passes()

    @property
    def reading(self) -> tuple[int, int]:
        """Workers or threads that read beside the training, and batches that are there."""
        source = self._source
        return (0, 0) if source is None else (source.readers, source.queued)

    @property
    def note(self) -> str:
        """Why batches are not read across epochs; empty: they are."""
        return self._passes.note

    def begin(self) -> Iterator[Any] | None:
        """The next pass; None: it has no batch."""
        if self._starts_anew or self._is_stale():  # this process reads from a copy, too
            self.close()
        if not self._is_judged and not self._is_judging and self._timing.doubts_workers:
            self.close()  # what is under way ends with its workers
            self._timing.begin_anew()
            self._is_judging, self.value = True, "comparing"
        number = self._passes.begin()
        self.gave_all = False
        return None if number is None else self._pass(number)

    def _is_stale(self) -> bool:
        """Whether the dataset or the ``collate_fn`` was changed since those who read got it, where
        the workers of the user's own loader would get it anew."""
        own = self._loader.num_workers > 0 and self._loader.persistent_workers
        if own or self._source is None:
            return False
        return not same(self._stamp, stamp_of_batches(self._loader))

    def close(self) -> None:
        """End workers and threads."""
        if self._source is not None:
            self._source.close()
            self._source = None
            self._passes.leave()
            self._passes = self._new_passes(self._passes)

    def _new_passes(self, earlier: Passes | None = None) -> Passes:
        passes = Passes(self._loader, earlier)
        if self._has_epochs:  # also in memory that workers share, which stay
            passes.note = "not across epochs: the dataset has set_epoch"
        return passes

    def _pass(self, number: int) -> Iterator[Any]:
        passes, gave_all = self._passes, False
        try:
            while not gave_all:
                if passes is not self._passes:
                    raise UsageError("the loader was closed while it was iterated over")
                if passes.current != number:
                    return  # a later pass has begun
                batch, sent = self._next(number)
                if sent.number == number:  # else of a pass that was left early
                    gave_all = self.gave_all = sent.last
                    yield batch
        except GeneratorExit:
            if passes.current == number:
                passes.leave()
            raise
        if passes.current == number:
            passes.end()

    def _next(self, number: int) -> tuple[Any, Batch]:
        """The next batch that was sent for in pass ``number`` or one before it, and what was
        asked."""
        try:
            if self._source is None:
                self._stamp = stamp_of_batches(self._loader)
                self._source = self._first_source()
            elif self._is_judging and self._timing.has_read(SEEN):
                self._source = self._judged_source()
            elif self._is_measuring and self._timing.has_read(MEASURED):
                self._source = self._chosen_source()
            if (failure := self._passes.failure) is not None:
                raise failure
            start = time.perf_counter()
            batch = next(self._source)
            if isinstance(batch, Failed):
                return None, self._failed(batch, number)
            if not self.skips:
                self._measure(batch, start, time.perf_counter())
            return batch, self._passes.received()
        except BaseException:
            self.close()
            raise

    def _measure(self, batch: Any, start: float, end: float) -> None:
        if not isinstance(self._source, Inline):
            self._timing.waited(start, end)
        elif not self._reads_itself:
            self._timing.read_here(start, end, _bytes_of(batch))

    def _failed(self, batch: Failed, number: int) -> Batch:
        """Raises what came instead of a batch, if it is one of pass ``number``."""
        sent = self._passes.received()
        if sent.number == number:
            raise batch.error
        if batch.ended:  # over a batch that nobody asks for any more
            self._source = None
            self._passes.resend()
        return sent

    @property
    def _is_measuring(self) -> bool:
        settled = self._reads_itself or self._is_judging
        return isinstance(self._source, Inline) and not settled

    def _judged_source(self) -> Source:
        """This process, where a step with a batch of the workers takes longer than one with a batch
        read here: they need cores that the training computes on, and taking a batch over is work.
        """
        self._is_judging, self._is_judged = False, True
        if not self._timing.workers_are_slower:
            return self._chosen_source()
        assert self._source is not None
        self._reads_itself = True
        self.value = "this process, as steps with batches of workers took longer"
        return self._source

    def _first_source(self) -> Source:
        if self._reads_itself or self._is_judging:
            return Inline(self._loader, self._passes, pin=self._pin)
        if self._config.workers != "auto":
            return self._started(self._config.workers)
        if self._loader.num_workers and not self._threads:  # the user knows
            return self._started(self._loader.num_workers)
        if self._timing.has_read(MEASURED):
            return self._chosen_source()
        self.value = "measuring"
        return Inline(self._loader, self._passes, pin=self._pin)

    def _chosen_source(self) -> Source:
        """Choose as many workers as reading takes of computing."""
        needed = SPARE * self._timing.read / max(self._timing.step, 1e-9)
        return self._started(max(1, min(math.ceil(needed), self._cores)))

    def _started(self, count: int) -> Source:
        count, ahead = self._within_memory(count)
        kind, each = "thread" if self._threads else "worker", max(1, ahead // count)
        settings: dict[str, Any] = {"pin": self._pin, "timeout": self._config.timeout}
        ahead = ahead if self._threads else each * count
        self.value = f"{count} {kind}{'s' * (count > 1)}, {ahead} batches ahead"
        if self._threads:
            return Threads(self._loader, self._passes, count=count, ahead=ahead, **settings)
        self._starts += 1
        seed = self._passes.seed + self._starts  # as another epoch, or a new start, draws others
        return Workers(self._loader, self._passes, count=count, each=each, seed=seed, **settings)

    def _within_memory(self, count: int) -> tuple[int, int]:
        """Workers and batches ahead that there is room for, one batch a worker at least."""
        depth, size = self._config.depth, self._timing.num_bytes
        if depth != "auto":
            return min(count, depth), depth
        ahead = EACH * count
        if not size or not (self._threads or SHARED_MEMORY.is_dir()):
            return count, ahead
        free = free_host_bytes() if self._threads else shutil.disk_usage(SHARED_MEMORY).free
        if size > free and not self._threads:
            raise DataError(
                f"a batch has {size / 2**20:.1f} MiB, {SHARED_MEMORY} has "
                f"{free / 2**20:.1f} MiB free, through which workers hand batches over; make it "
                "larger, or set data.prefetch.threads"
            )
        room = max(1, int(SHARE * free / self._sharers / size))
        return min(count, room), min(ahead, room)


def _bytes_of(batch: Any) -> int:
    """Bytes of the tensors in a batch; sparse ones do not say."""
    return sum(one.nbytes for one in tensors(batch) if one.layout is not torch.sparse_coo)


class _Timing:
    """Times of this process to read a batch and to use it, and to use those of others."""

    def __init__(self) -> None:
        self._reads: list[float] = []
        self._steps: list[float] = []
        self._waits: deque[float] = deque(maxlen=SEEN)
        self._others: deque[float] = deque(maxlen=SEEN)
        """The latest times from batch to batch, where others read."""
        self._ended: float | None = None
        self.num_bytes = 0

    def read_here(self, start: float, end: float, num_bytes: int) -> None:
        """A batch was read by this process."""
        if self._ended is not None:
            self._steps.append(start - self._ended)
        self._reads.append(end - start)
        self._ended = end
        self.num_bytes = max(self.num_bytes, num_bytes)

    def begin_anew(self) -> None:
        """Forget what this process has read."""
        self._reads, self._steps, self._ended = [], [], None

    def waited(self, start: float, end: float) -> None:
        """A batch came that another process or thread has read."""
        self._waits.append(end - start)
        if self._ended is not None:
            self._others.append(end - self._ended)
        self._ended = end

    def has_read(self, count: int) -> bool:
        """Whether this process has read so many batches."""
        return len(self._reads) >= count

    @property
    def doubts_workers(self) -> bool:
        """Whether steps with their batches are to be compared with steps without."""
        known = len(self._others) == SEEN and self.has_read(MEASURED)
        return known and median(self._waits) > WAITED * self.read

    @property
    def workers_are_slower(self) -> bool:
        """Whether a step with a batch of theirs takes longer than one with a batch read here."""
        return median(self._others) > CLEARLY * (self.read + median(_later_half(self._steps)))

    @property
    def read(self) -> float:
        return median(_later_half(self._reads))

    @property
    def step(self) -> float:
        """The fastest: the first steps of a training allocate, compile and warm up."""
        return min(self._steps)


def _later_half(seconds: list[float]) -> list[float]:
    """Drop the first ones, which allocate, compile and warm up."""
    return seconds[len(seconds) // 2 :]
