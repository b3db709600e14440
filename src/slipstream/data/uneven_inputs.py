"""The same number of batches on every rank, also where the ranks' loaders differ in length.

No batch is dropped or changed: a rank that has run out gets its last batch again, as a *dummy
batch* that the averaged gradient does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import ModelError
from slipstream.trace.event import DATA_WAIT
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import collective_errors

_UNKNOWN = -1
_END = object()


class UnevenInputLoader:
    """The user's loader, iterated in step with all other ranks.

    Lengths are compared once per epoch, when iteration starts (one small collective). If they are
    equal, nothing else happens. If they differ, a rank that has run out gets its last batch again
    until the longest loader ends: loops, learning-rate schedules and collectives in the model stay
    in step on all ranks, and the average counts only the ranks that still have a batch. If a loader
    has no length, ranks ask each other before every batch (one small collective each).

    Other attributes are those of the user's loader: its ``dataset``, its ``sampler``.

    Args:
        loader: any iterable of batches.
        group: the ranks that iterate in step, for CPU tensors; None: this rank alone.
        recorder: gets a span for every wait for a batch.
        on_start: called when an epoch starts.
        reading: what such a span says of those who read.

    Attributes:
        dummy_batch: whether the present batch is a dummy batch.
        active: the number of ranks that have a batch of their own in this step.

    Exactness: bitwise for ranks with equal lengths.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        group: dist.ProcessGroup | None,
        recorder: Recorder | None = None,
        on_start: Callable[[], None] | None = None,
        reading: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._loader, self._group, self._reading = loader, group, reading
        self._recorder, self._on_start = recorder, on_start
        self._world_size = dist.get_world_size(group) if group is not None else 1
        self.dummy_batch = False
        self.active = self._world_size

    def detach(self) -> None:
        """Iterate without the other ranks from now on; a group ends with its last reference."""
        self._group = self._recorder = self._on_start = None

    def __len__(self) -> int:
        """Length of this rank's own loader; an epoch has that of the longest one."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._on_start is not None:
            self._on_start()
        try:
            lengths = [0] if self._group is None else self._gather(_length(self._loader))
            if _UNKNOWN not in lengths and len(set(lengths)) == 1:
                yield from self._timed()
            else:
                yield from self._padded(lengths)
        finally:
            self.dummy_batch, self.active = False, self._world_size

    def _padded(self, lengths: Sequence[int]) -> Iterator[Any]:
        """This rank's batches, then dummy batches until every rank has run out."""
        batches, batch, step = self._timed(), _END, 0
        known = _UNKNOWN not in lengths
        while not known or step < max(lengths):
            following = next(batches, _END)
            out = following is _END
            has_batch = [length > step for length in lengths] if known else self._gather(not out)
            self.active = sum(has_batch)
            if not self.active:
                return
            empty = [rank for rank, has in enumerate(has_batch) if not has]
            if empty and not step:  # raised on every rank alike
                raise ModelError(
                    f"the loaders of ranks {empty} are empty while others hold batches; give every "
                    "rank at least one batch, for instance with torch's DistributedSampler(dataset)"
                )
            self.dummy_batch, batch = out, batch if out else following
            yield batch
            step += 1

    def _timed(self) -> Iterator[Any]:
        """The loader's batches; the wait for each is recorded."""
        batches = iter(self._loader)
        while True:
            recorder = self._recorder  # each time: detach() may come between two batches
            start = 0.0
            reading: Mapping[str, int] = {}
            if recorder is not None and recorder.active:
                start, reading = recorder.now(), self._reading()
            if (batch := next(batches, _END)) is _END:
                return
            if recorder is not None:
                recorder.add(DATA_WAIT, start, recorder.now(), **reading)
            yield batch

    def _gather(self, value: int) -> list[int]:
        """The ``value`` of every rank."""
        values = torch.empty(self._world_size, dtype=torch.int64)
        with collective_errors("the comparison of the loaders"):
            dist.all_gather(list(values.split(1)), torch.tensor([int(value)]), group=self._group)
        return [int(v) for v in values]


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # e.g. of an IterableDataset
        return _UNKNOWN
