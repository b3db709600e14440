"""The same number of batches on every rank, also where the ranks' loaders differ in length.

No batch is dropped or changed: a rank that has run out gets its last batch again, as a *dummy
batch* that the averaged gradient does not count.

[Note: Who has a batch]
Ranks promise each other how many batches they have for certain, and agree again when the shortest
promise is used up. A loader whose length is certain (`certain_length`) promises all it has, so
ranks with equal lengths agree twice an epoch, at its begin and at its end. Any other one promises
the batch that it holds, so ranks agree before each one; the answer is awaited in ``backward()``,
after forward has run beside it. No other ``len()`` is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import current_thread
from typing import Any, NoReturn, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist

from slipstream.data import pass_random
from slipstream.data.agreement import Agreement
from slipstream.data.batches import content_of, copied
from slipstream.data.earlier_epoch import warn_of_an_earlier_epoch
from slipstream.data.lengths import certain_length, epoch_of
from slipstream.data.live_passes import LivePasses
from slipstream.data.loader_around import LoaderAround
from slipstream.errors import DataError, UsageError, warn
from slipstream.trace.event import DATA_WAIT
from slipstream.trace.recorder import Recorder


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that keeps its place itself, as torchdata's does."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Start:
    """Begin of a pass: behind the batches that another one has given, or with its first.

    Attributes:
        position: of that pass; None: there is none.
        skip: batches that it has given.
        epoch: of that pass: at another one it is over; None: it counts none.
        draw: the random states with which it began; None: those of now.
        lives_on: whether workers of a pass before it read for it; None: as they do now.
    """

    position: Mapping[str, Any] | None = None
    skip: int = 0
    epoch: int | None = None
    draw: pass_random.RandomStates | None = None
    lives_on: bool | None = None


_END = object()
_NOT_READ = object()


class UnevenInputLoader(LoaderAround):
    """The user's loader, iterated in step with all other ranks.

    A rank that has run out gets its last batch again until the longest loader ends: loops,
    learning-rate schedules and collectives in the model stay in step on all ranks, and the average
    counts only the ranks that still have a batch. How ranks know that is in the note above.

    An error of the loader ends nothing: where its iterator can go on, so can this one.

    Other attributes are those of the user's loader: its ``dataset``, its ``sampler``. What is set
    on it is set there.

    Args:
        loader: any iterable of batches; that of another session is followed, so that two sessions
            can train on the same batches. Of one that is over, the user's loader counts.
        group: the ranks that iterate in step, for CPU tensors; None: this rank alone.
        recorder: gets a span for every wait for a batch.
        on_start: called when an epoch starts.
        reading: what such a span says of those who read.
        skipping: entered while batches are dropped that a run before this one has used.
        explaining: turns an exchange that failed inside into an error that says why.
        rates: learning rates, which all ranks must have alike where a pass begins.

    Raises, while it is iterated, on every rank:
        ModelError: the loaders of some ranks are empty, those of others are not.
        MismatchError: ranks are at different batches, as one has left its loop early, or have other
            learning rates.
        ExchangeError: another rank is gone.
        DataError: a loader whose length is certain has given fewer batches; on this rank.

    Exactness: bitwise for ranks with equal lengths.
    """

    _detached = False

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        group: dist.ProcessGroup | None,
        recorder: Recorder | None = None,
        on_start: Callable[[], None] | None = None,
        reading: Callable[[], Mapping[str, int]] = dict,
        skipping: Callable[[], AbstractContextManager[object]] = nullcontext,
        explaining: Callable[[], AbstractContextManager[object]] = nullcontext,
        rates: Callable[[], Sequence[object]] = tuple,
    ) -> None:
        while isinstance(loader, UnevenInputLoader) and loader._detached:
            loader = loader._loader
        self._followed = loader if isinstance(loader, UnevenInputLoader) else None
        self._loader, self._reading, self._skipping = loader, reading, skipping
        self._group = group if self._followed is None else None
        self._recorder, self._on_start, self._explaining = recorder, on_start, explaining
        self._rates = rates
        self._ranks = dist.get_world_size(group) if group is not None else 1
        self._passes = 0
        self._agreement: Agreement | None = None
        self._broken: DataError | None = None
        self._live = LivePasses[_Pass]()
        self._next = _Start()
        self._unused: _Start | None = None  # of the last pass, until a batch of it is trained on
        self._has_workers = False

    @property
    def drawn_with(self) -> pass_random.RandomStates | None:
        """The random states with which the present pass began, or the next one will that goes on
        with it, of this rank; None: there is none, or it is over."""
        if self._followed is not None:
            return self._followed.drawn_with
        present = self._live.present
        return self._next.draw if present is None else present.drawn_with

    @property
    def generators(self) -> list[torch.Tensor]:
        """The states of the generators that the loader has, as they are now, of this rank."""
        return pass_random.own_states(self._loader)

    def restore_generators(self, states: Sequence[torch.Tensor]) -> None:
        """Let the loader's generators go on with the numbers of `generators`."""
        pass_random.restore_own(self._loader, states)

    @property
    def workers_live_on(self) -> bool:
        """Whether workers of a pass before it read for the present pass, or for the next one, of
        this rank: it draws no seed for them."""
        if self._followed is not None:
            return self._followed.workers_live_on
        present = self._live.present
        return self._next_lives_on if present is None else present.workers_live_on

    @property
    def _next_lives_on(self) -> bool:
        lives_on = self._next.lives_on
        return self._has_workers if lives_on is None else lives_on

    def let_workers_live_on(self, lives_on: bool) -> None:
        """Let the next pass be one for which `workers_live_on` was so."""
        if self._followed is not None:
            self._followed.let_workers_live_on(lives_on)
        else:
            self._next = replace(self._next, lives_on=lives_on)

    def draw_with(self, states: pass_random.RandomStates) -> None:
        """Let the next pass draw its order as one that began so, which it goes on with."""
        if self._followed is not None:
            self._followed.draw_with(states)
        else:
            self._next = replace(self._next, draw=states)
            self._live.forget()

    def position(self) -> dict[str, Any]:
        """The place in the present pass, or where the next one goes on: the loader's own state, or
        how many batches it has given, and of which epoch."""
        if self._followed is not None:
            return self._followed.position()
        present = self._live.present
        steps, epoch = self._next.skip, self._next.epoch
        if present is not None:
            steps, epoch = present.steps, present.epoch
        place: dict[str, Any] = {"batches": steps, "ranks": self._ranks}
        if self._keeps_place(self._loader):
            place = {"own": self._loader.state_dict()}
        return place | ({} if epoch is None else {"over": epoch})

    def go_to(self, position: Mapping[str, Any]) -> bool:
        """Let the next pass begin where the one of ``position`` was.

        On another number of ranks it skips as many samples, if batches are as large. Their order
        is what the loader draws; `draw_with` lets it draw that of before. Where the sampler has
        been set to another epoch by then, it skips nothing. A pass that was under way, and goes on,
        keeps its own place, and the next one begins anew.

        Returns:
            Whether it can; else nothing changes.
        """
        if self._followed is not None:
            return self._followed.go_to(position)
        epoch = position.get("over")
        if "batches" in position:
            skip = position["batches"] * position["ranks"] // self._ranks
            self._next = _Start(position, skip, epoch)
        elif "own" in position and self._keeps_place(self._loader):
            self._loader.load_state_dict(position["own"])
            self._next = replace(self._next, position=position, skip=0, epoch=epoch, draw=None)
        else:
            return False
        self._unused = None
        self._live.forget()
        return True

    @staticmethod
    def _keeps_place(loader: object) -> TypeGuard[StatefulLoader]:
        """Whether the loader itself, and not one that it stands for, has a state."""
        return issubclass(type(loader), StatefulLoader)

    @property
    def dummy_batch(self) -> bool:
        """Whether the present batch is a dummy batch."""
        if self._followed is not None:
            return self._followed.dummy_batch
        return self._agreement is not None and self._agreement.dummy_batch

    @property
    def active(self) -> int:
        """The number of ranks that have a batch of their own in this step. Reading it takes the
        oldest batch that was given out as used.

        Raises:
            UsageError: that is not the present batch, and other ranks had one then.
        """
        if self._followed is not None:
            return self._followed.active
        self.note_training()
        return self._ranks if self._agreement is None else self._agreement.use()

    def note_training(self) -> None:
        """Note that the last batch of a pass that is still there is trained on."""
        if self._followed is not None:
            self._followed.note_training()
        self._live.note_training()
        self._unused = None

    def has_batch(self, rank: int) -> bool:
        """Whether a rank has a batch of its own in the present step, which is known after
        `active`."""
        if self._followed is not None:
            return self._followed.has_batch(rank)
        return self._agreement is None or self._agreement.has_batch(rank)

    def detach(self) -> None:
        """Iterate without the other ranks from now on; a group ends with its last reference."""
        if self._agreement is not None:
            self._agreement.abandon()
        self._group = self._recorder = self._on_start = self._agreement = None
        self._explaining, self._rates, self._detached = nullcontext, tuple, True

    def __len__(self) -> int:
        """Length of this rank's own loader; an epoch is as long as the longest one really is."""
        return len(self._loader)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "session.loader keeps step with the other ranks of its session, so it cannot be copied "
            "or pickled; copy the loader that accelerate() got"
        )

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def _begin(self, begun: _Pass) -> tuple[Iterator[Any], Agreement | None]:
        """Start a pass, behind the batches that it skips."""
        if self._broken is not None:
            raise self._broken
        if self._agreement is not None:
            self._agreement.settle()
        if self._on_start is not None:
            self._on_start()
        self._take_back()
        epoch = epoch_of(self._loader)
        is_other = self._next.epoch is not None and self._next.epoch != epoch
        if is_other:
            warn_of_an_earlier_epoch(epoch, self._next.epoch)
            known = self._next.lives_on is not None  # of the epoch before, which the state ends
            self._next = _Start(lives_on=pass_random.seeds_once(self._loader) if known else None)
        begun.epoch = epoch_of(self._loader)  # before iterating, at which a sampler may count
        goes_on, again = self._next.skip > 0, self._next.draw
        begun.drawn_with = pass_random.states(self._loader) if again is None else again
        begun.workers_live_on = lives_on = self._next_lives_on
        if lives_on and not self._has_workers and pass_random.seeds_once(self._loader):
            pass_random.begin_workers(self._loader)
        with pass_random.drawn_with(self._loader, begun.drawn_with, again=again is not None):
            if self._has_workers and not lives_on:
                pass_random.draw_seed(self._loader)
            batches: Iterator[Any] = iter(self._loader)
            with self._skipping():
                begun.skip(batches, self._next.skip)
            goes_on_itself = is_other and self._keeps_place(self._loader)
            if goes_on_itself and not begun.has_next(batches):
                batches = iter(self._loader)  # the state was of the end of the epoch before
        self._has_workers = pass_random.seeds_once(self._loader)
        self._next = _Start()
        if self._group is None:
            return batches, None
        self._passes += 1
        rank = dist.get_rank(self._group)
        rates = self._rates()
        return batches, Agreement(rank, self._ranks, self._passes, goes_on=goes_on, rates=rates)

    def _take_back(self) -> None:
        """Begin where the last pass began, if no batch of it was trained on: the script has only
        looked at its first one."""
        if self._unused is not None:
            self._next = self._unused
            position = self._next.position or {}
            if "own" in position and self._keeps_place(self._loader):
                self._loader.load_state_dict(position["own"])
        self._unused = None if self._next.position is None else self._next


class _Pass(Iterator[Any]):
    """This rank's batches, then dummy batches until every rank has run out.

    No generator, which would end with the first error of the loader.

    Attributes:
        drawn_with: the random states with which it began.
        workers_live_on: whether workers of a pass before it read for it.
        epoch: to which its sampler was set; None: it counts none.
        steps: batches so far, dummy batches and skipped ones included; 0 once it is over.
        is_over: whether it gives no more batches.
    """

    def __init__(self, loader: UnevenInputLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._agreement: Agreement | None = None
        self._length: int | None = None
        self._following: Any = _NOT_READ  # kept where the agreement is interrupted
        self._last: Any = _END
        self._given, self.is_over = 0, False
        self.steps = 0
        self.drawn_with: pass_random.RandomStates | None = None
        self.workers_live_on = False
        self.epoch: int | None = None
        self._error = ""  # the last one, in words: it would hold what raised it
        self._errors = 0

    def __next__(self) -> Any:
        loader = self._loader
        if self.is_over:
            raise StopIteration
        if self._batches is None:
            self._batches, self._agreement = loader._begin(self)
            self._length = certain_length(loader._loader)
        else:  # whatever was restored meanwhile
            loader._next = _Start()
        loader._live.note_asked(self)
        if loader._group is None:  # alone, or detached meanwhile
            self._agreement = None
        if self._agreement is not None:
            loader._agreement = self._agreement
            with loader._explaining():
                self._agreement.settle()
        if self._following is _NOT_READ:
            self._following = self._read()
        has_one = self._following is not _END
        if self._error and not has_one:
            self._check_went_on()
        if not (has_one if self._agreement is None else self._agreed(has_one)):
            self._end()
            loader._unused = None
            raise StopIteration
        batch = self._following if has_one else copied(self._last)
        if has_one:
            self._last = batch if self._agreement is None else copied(batch)
            self._following = _NOT_READ
            self._given += 1
        self.steps += 1
        return batch

    def skip(self, batches: Iterator[Any], count: int) -> None:
        """Drop the first ones, which a run before this one has used. What is raised between them it
        has caught, too; more errors than batches it has not, nor one that ends the iterator."""
        self.steps, self._given, self._errors = count, 0, 0
        raised: Exception | None = None  # instead of the latest batch
        while self._given < count:
            try:
                batch = next(batches, _END)
            except Exception as error:
                if self._errors >= count:
                    raise
                raised, self._error = error, repr(error)
                self._errors += 1
                warn(
                    f"among the {count} batches that the run before this one has used, and that "
                    f"are skipped, one raises {error!r}: it counts as none of them",
                )
                continue
            if batch is _END:
                if raised is None:
                    break
                try:
                    raise raised  # it has ended a generator, whose other batches nobody would read
                finally:
                    raised = None  # else it holds this frame, which holds it
            raised, self._last = None, batch
            self._given += 1

    def has_next(self, batches: Iterator[Any]) -> bool:
        """Whether there is a batch, which is the first one."""
        first = next(batches, _END)
        self._following = _NOT_READ if first is _END else first
        return first is not _END

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self.is_over, self.steps = True, 0
        self._last = self._following = _END
        if self._agreement is not None:
            self._agreement.end()

    def _check_went_on(self) -> None:
        """Refuse an iterator that has ended with an error that was caught, as generators do.

        Raises:
            DataError: batches are left that nobody would read.
        """
        left = 0 if self._length is None else self._length - self._given - self._errors
        if left > 0:
            self._end()
            raise DataError(
                f"the pass has ended with an error that was caught ({self._error}), {left} batches "
                "before its end; begin another pass, or catch errors of samples in the dataset"
            )

    def _agreed(self, has_one: bool) -> bool:
        """Whether there is a step, as a rank has a batch."""
        assert self._agreement is not None
        assert self._loader._group is not None
        if not has_one and self._agreement.promised:
            self._loader._broken = self._broken_promise()
            raise self._loader._broken
        left = 1 if self._length is None or self._error else self._length - self._given
        promise = max(left, 1) if has_one else 0
        if self._length is None or self._error:
            self._agreement.asked_in = current_thread()
        if has_one and not self.steps and self._loader._passes == 1:
            self._agreement.content = content_of(self._following)
        with self._loader._explaining():
            return self._agreement.next_step(promise, self._loader._group)

    def _broken_promise(self) -> DataError:
        cause = "its dataset raises StopIteration, or its samples were changed in mid-epoch"
        if self._error:
            cause = f"an error was caught, and its batch is lost: {self._error}"
        return DataError(
            f"the loader has {self._length} batches, as its sampler says, and gave {self._given}: "
            f"{cause}; other ranks count on every batch, so close the session. Correct the loader, "
            "or catch errors of samples in the dataset, or in a generator around the loader"
        )

    def _read(self) -> Any:
        """The loader's next batch, or _END; the wait for it is recorded."""
        assert self._batches is not None
        recorder = self._loader._recorder
        start = 0.0
        reading: Mapping[str, int] = {}
        if recorder is not None and recorder.active:
            start, reading = recorder.now(), self._loader._reading()
        try:
            batch = next(self._batches, _END)
        except BaseException as error:
            self._error = repr(error)
            self._errors += 1
            raise
        if recorder is not None and batch is not _END:
            recorder.add(DATA_WAIT, start, recorder.now(), **reading)
        return batch
