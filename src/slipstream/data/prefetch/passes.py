"""The indices of one pass over a ``DataLoader`` after the other, without a border between them.

[Note: The order of samples]
A pass has the order that the user's loader would give it: the same sampler draws it, from the same
random numbers. Only the moment differs, as the next pass is drawn while the last batches of this
one are still to come. For that moment its generator is set to where it will be, and put back. When
the pass begins, sampler and generator are looked at: if both are where they were expected, the pass
stands, and the generator moves on; else the pass is drawn again. So the order is that of the user's
loader in any case, and a wrong guess costs what was read ahead.

A training that draws from torch's default generator on the CPU (dropout there, say) makes every
guess wrong. After the first one nothing is drawn ahead any more; a ``generator`` of the loader's
own, or torch's ``DistributedSampler``, can be foreseen. What samplers of other classes look at is
not known: their next pass is drawn when it begins.

A pass that is left early has drawn more than the user's loader would have by then. Where that has
moved the generator, it is put back. The next pass is drawn from copies of the samplers, so that the
user's own are where the training is.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
)

from slipstream.data.balance import BalancedBatches
from slipstream.data.prefetch.samplers import (
    FORESEEN,
    counts_epochs,
    draws_in_between,
    samplers_of,
    settings_of,
)

UNFORESEEN = (
    "not across epochs: their order is drawn from random numbers that the training draws, too; "
    "give the DataLoader a generator of its own"
)
UNKNOWN = "not across epochs: what the sampler's order depends on is not known"

_END = object()
_Position = tuple[tuple[int, int] | None, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A request to a dataset: a list of indices, or one where batching is off."""

    number: int
    """Of the pass."""
    indices: Any
    last: bool
    """Whether the pass ends with it."""


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass that has begun to be drawn."""

    number: int
    position: _Position
    before: torch.Tensor
    """The state of the generator when it began."""
    length: int
    """Batches, of a sampler that is known not to draw between them."""
    moves: deque[tuple[int, torch.Tensor]]
    """After how many draws the generator came to which state; the first is that of none."""
    batches: Iterator[Any]
    following: Any = None
    """The batch to come; _END: there is none."""
    failure: Exception | None = None
    """What the sampler raised instead of it."""
    count: int = 0
    """How often the sampler was asked."""

    @property
    def after(self) -> torch.Tensor:
        return self.moves[-1][1]

    @property
    def draws(self) -> bool:
        """Whether the sampler has drawn from the generator."""
        return len(self.moves) > 1


class Passes:
    """Iterates over the indices of all batches, pass after pass.

    Args:
        loader: map-style; its sampler, generator and workers say how it would draw.
        earlier: those that these go on from.

    Attributes:
        sent: the batches that were given out and not received yet, oldest first.
        note: why the next pass is not drawn before this one is over; empty: it is.
        current: the number of the present pass.
        seed: what was drawn for workers when it began.
    """

    def __init__(self, loader: DataLoader[Any], earlier: Passes | None = None) -> None:
        self._samplers = samplers_of(loader)
        self._sampler: Any = self._samplers[0]
        self._epochs: Any = next(filter(counts_epochs, self._samplers), None)
        own = [getattr(one, "generator", None) for one in reversed(self._samplers)]
        generators = [one for one in own if isinstance(one, torch.Generator)]
        self._generator = generators[0] if generators else torch.default_generator
        self._seeds_of = loader.generator
        self._seeds: torch.Generator = loader.generator or torch.default_generator
        self._seeds_once = loader.num_workers > 0 and loader.persistent_workers
        self._asks_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._passes: deque[_Pass] = deque()
        self.current = -1
        self.seed: int = torch.initial_seed() if earlier is None else earlier.seed
        self._last: int = -1 if earlier is None else earlier._last
        self._received, self._is_over, self._is_left = 0, False, False  # of the present pass
        self._step = 1  # by which the epoch grows from pass to pass, as far as is known
        self.sent: deque[Batch] = deque()
        self._again: deque[Batch] = deque()
        known = all(type(one) in FORESEEN for one in self._samplers) and len(self._samplers) <= 2
        self._begins_twice = not known and loader.num_workers > 0
        self._draws_in_between = not known or any(map(draws_in_between, self._samplers))
        self.note = "" if known else UNKNOWN

    def begin(self) -> int | None:
        """Begin the next pass, even if the present one is not over.

        Returns:
            Its number; None: it has no batch.
        """
        position = self._position()
        current = self._passes[0] if self._passes else None
        coming = deque(p for p in self._passes if p.number > self.current)
        if self.leave():
            coming = deque()
        if coming and coming[0].draws and self._has_moved(coming[0].before):
            self.note, coming = UNFORESEEN, deque()
        elif coming and coming[0].position != position:
            place, before = position[0], None if current is None else current.position[0]
            if place is not None and before is not None:
                self._step = place[0] - before[0]  # 0: nobody calls set_epoch
            coming = deque()
        if not coming:
            coming = deque([self._drawn(position)])
        else:
            # The generator comes to where it would be now without reading ahead: what the script
            # draws from it next must be what it would have drawn.
            if coming[0].draws:
                self._generator.set_state(coming[0].after)
            if not coming[0].draws or self._seeds is not self._generator:
                self._draw_seed()
            if isinstance(self._sampler, BalancedBatches):
                iter(self._sampler)  # it tells where its latest iteration began
        self._passes, self.current = coming, coming[0].number
        self._received, self._is_left = 0, False
        is_empty = (
            coming[0].following is _END
            and coming[0].failure is None
            and not any(batch.number == self.current for batch in self.sent)
        )
        self._is_over = is_empty
        return None if is_empty else self.current

    @property
    def failure(self) -> Exception | None:
        """The sampler's error in the present pass, once all before it was received."""
        return None if self.sent else self._passes[0].failure

    def resend(self) -> None:
        """Requeue the batches of this pass that were not received; drop those of earlier passes."""
        self._again = deque(batch for batch in self.sent if batch.number >= self.current)
        self.sent.clear()

    def received(self) -> Batch:
        """The oldest batch that was sent has come."""
        batch = self.sent.popleft()
        if batch.number == self.current:
            self._received += 1
            moves = self._passes[0].moves
            while len(moves) > 2 and moves[2][0] <= self._received:
                del moves[1]  # it will not be put back any more
        return batch

    def leave(self) -> bool:
        """The training leaves the present pass, if it is not over.

        Returns:
            Whether it was left early.
        """
        if not self._passes or self._is_over or self._has_given_all(self._passes[0]):
            return False
        if not self._is_left:
            self._put_back(self._passes[0])
        self._is_left = True
        return True

    def end(self) -> None:
        """The training has asked for a batch after the last one."""
        self._is_over = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The indices of the next batch; StopIteration: what comes then is not known yet."""
        if self._again:
            self.sent.append(self._again.popleft())
            return self.sent[-1].indices
        drawn = self._passes[-1]
        if drawn.following is _END:
            if self.note or drawn.failure is not None:
                raise StopIteration
            try:
                with self._foreseen(drawn):
                    drawn = self._next_pass(drawn.position)
                if drawn.failure is not None:
                    raise drawn.failure
            except Exception:  # of a guess: the user may never come there
                self.note = UNKNOWN
                raise StopIteration from None
            self._passes.append(drawn)
        if drawn.following is _END:
            raise StopIteration
        indices = drawn.following
        if drawn.number == self.current:
            self._ask(drawn)
        else:
            with self._foreseen(drawn):
                self._ask(drawn)
        is_last = drawn.following is _END and drawn.failure is None
        self.sent.append(Batch(drawn.number, indices, is_last))
        return indices

    def _ask(self, drawn: _Pass) -> None:
        """Ask the sampler for a batch."""
        # A look at the generator takes a tenth of a millisecond. RandomSampler draws before its
        # first sample, and once more after its last one.
        asked = drawn.count + 1
        may_draw = asked == 1 or asked >= drawn.length or self._draws_in_between
        # not that of its last move: the script may have drawn, or seeded, since
        before = self._generator.get_state() if may_draw else None
        try:
            drawn.following = next(drawn.batches, _END)
        except Exception as error:
            # Without this frame, which holds its callers: in workers' loaders torch's iterator.
            trace = error.__traceback__ and error.__traceback__.tb_next
            drawn.following, drawn.failure = _END, error.with_traceback(trace)
        drawn.count = asked
        if before is not None and self._has_moved(before):
            drawn.moves.append((drawn.count, self._generator.get_state()))

    def _has_given_all(self, current: _Pass) -> bool:
        """Whether all was received, and asking for more has not moved the generator."""
        is_last = current.following is _END and self._received == current.count - 1
        return is_last and current.moves[-1][0] <= self._received

    def _put_back(self, left: _Pass) -> None:
        """The generator as the user's loader would have left it, unless others have used it."""
        if self._has_moved(left.after):
            return
        asked = self._received + self._asks_ahead
        self._generator.set_state([state for count, state in left.moves if count <= asked][-1])

    @contextmanager
    def _foreseen(self, last: _Pass) -> Iterator[None]:
        """The generator is where it will be after a pass; then it is as it was."""
        now = self._generator.get_state()
        if last.number != self.current:
            self._generator.set_state(last.after)
        try:
            yield
        finally:
            self._generator.set_state(now)

    def _next_pass(self, position: _Position) -> _Pass:
        """The pass after one at ``position``, unless the user says otherwise."""
        sampler: Any = copy.copy(self._sampler)
        inner: Any = getattr(sampler, "sampler", None)
        if isinstance(sampler, BatchSampler):
            inner = sampler.sampler = copy.copy(inner)
        place, settings = position
        if place is not None:
            place = place[0] + self._step, 0
            next(filter(counts_epochs, (sampler, inner))).set_epoch(place[0])
        return self._drawn((place, settings), sampler)

    def _drawn(self, position: _Position, foreseen: Any = None) -> _Pass:
        """A pass with its order: most samplers draw it with their first batch.

        Args:
            position: where it begins.
            foreseen: the sampler that draws it ahead; None: the user's, as it begins now.
        """
        sampler = self._sampler if foreseen is None else foreseen
        before = self._generator.get_state()
        batches = iter(sampler)
        if foreseen is None:
            self._draw_seed()
        elif self._seeds is self._generator:
            self._drawn_seed()
        if self._begins_twice and not (self._last >= 0 and self._seeds_once):
            batches = iter(sampler)  # as iter(loader) does, for its workers
        self._last += 1
        moves = deque([(0, self._generator.get_state())])
        length = 0 if self._draws_in_between else len(sampler)
        drawn = _Pass(self._last, position, before, length, moves, batches)
        self._ask(drawn)
        return drawn

    def _draw_seed(self) -> None:
        """Draw as iter(loader) does, for its workers."""
        self.seed = self._drawn_seed()

    def _drawn_seed(self) -> int:
        if self._last >= 0 and self._seeds_once:
            return self.seed
        return int(torch.empty((), dtype=torch.int64).random_(generator=self._seeds_of))

    def _has_moved(self, since: torch.Tensor) -> bool:
        return not torch.equal(self._generator.get_state(), since)

    def _position(self) -> _Position:
        """The epoch and the batch at which the sampler is to begin, where it can tell; and what its
        order depends on besides."""
        place: tuple[int, int] | None = None
        if self._epochs is not None:
            place = getattr(self._epochs, "position", (self._epochs.epoch, 0))
        known = self.note != UNKNOWN
        return place, tuple(map(settings_of, self._samplers)) if known else ()
