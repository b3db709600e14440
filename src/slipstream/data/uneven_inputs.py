"""The same number of batches on every rank, whatever the ranks' loaders hold.

Never drops a batch and never changes one; a rank that has run out gets its last batch again, as a
filler that counts for nothing in the averaged gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import ModelError
from slipstream.trace.event import DATA_WAIT
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import collective_errors

_UNKNOWN = -1
_NOTHING = object()


class UnevenInputLoader:
    """The user's loader, iterated in step with all other ranks.

    Lengths are compared once an epoch, when iteration starts (one small collective). Where all are
    equal, that is all. Where they differ, a rank that has run out is given its last batch again
    until the longest one ends: loops, learning-rate schedules and collectives in the model stay in
    step on all ranks, the average counts only ranks with a batch of their own, and no batch is
    lost. Where a loader has no length, ranks compare notes before every batch (one small collective
    each).

    Attributes:
        filler: whether the batch given last is a filler.
        active: how many ranks have a batch of their own in this step.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        group: dist.ProcessGroup | None,
        recorder: Recorder | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._loader, self._group, self._recorder, self._on_start = (
            loader,
            group,
            recorder,
            on_start,
        )
        self._world_size = dist.get_world_size(group) if group is not None else 1
        self.dummy_batch = False
        self.active = self._world_size

    def detach(self) -> None:
        """Leave the other ranks: from here on it is the user's loader and no more."""
        self._group = self._recorder = self._on_start = None

    def __len__(self) -> int:
        """Length of this rank's own loader; an epoch has that of the longest one."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """What else the loader has: its ``dataset``, its ``sampler``."""
        if name.startswith("_"):  # a copy of this object asks before it has a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._on_start is not None:
            self._on_start()
        try:
            if self._group is None:
                yield from self._timed()
            else:
                lengths = self._compare(_length(self._loader))
                if _UNKNOWN in lengths:
                    yield from self._step_by_step()
                elif len(set(lengths)) == 1:
                    yield from self._timed()
                else:
                    yield from self._to_the_longest(lengths)
        finally:
            self.dummy_batch, self.active = False, self._world_size

    def _to_the_longest(self, lengths: list[int]) -> Iterator[Any]:
        _refuse_empty(lengths)
        batches = self._timed()
        batch = _NOTHING
        for step in range(max(lengths)):
            own = next(batches, _NOTHING)
            self.dummy_batch = own is _NOTHING
            batch = batch if self.dummy_batch else own
            self.active = sum(length > step for length in lengths)
            yield batch

    def _step_by_step(self) -> Iterator[Any]:
        batches = self._timed()
        batch = _NOTHING
        while True:
            own = next(batches, _NOTHING)
            has_batch = self._compare(own is not _NOTHING)
            self.active = sum(has_batch)
            if not self.active:
                return
            if batch is _NOTHING:  # the first step, on every rank alike
                _refuse_empty(has_batch)
            self.dummy_batch = own is _NOTHING
            batch = batch if self.dummy_batch else own
            yield batch

    def _timed(self) -> Iterator[Any]:
        """The loader's batches; the wait for each is recorded."""
        batches = iter(self._loader)
        while True:
            recorder = self._recorder
            start = recorder.now() if recorder is not None else 0.0
            try:
                batch = next(batches)
            except StopIteration:
                return
            if recorder is not None:
                recorder.add(DATA_WAIT, start, recorder.now())
            yield batch

    def _compare(self, value: int) -> list[int]:
        every = torch.empty(self._world_size, dtype=torch.int64)
        with collective_errors("the comparison of the loaders"):
            dist.all_gather(list(every.split(1)), torch.tensor([int(value)]), group=self._group)
        return [int(v) for v in every]


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # an iterable data set
        return _UNKNOWN


def _refuse_empty(lengths: list[int]) -> None:
    """Raise, on every rank alike, if some ranks have batches and others have none."""
    empty = [rank for rank, length in enumerate(lengths) if not length]
    if empty and any(lengths):
        raise ModelError(
            f"the loaders of ranks {empty} are empty while others hold batches; give every rank at "
            "least one batch, for instance with torch's DistributedSampler(dataset)"
        )
