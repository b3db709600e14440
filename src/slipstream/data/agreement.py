"""Agreement of ranks that iterate in step on who has a batch; see the note in uneven_inputs."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread, current_thread
from zlib import crc32

import torch
import torch.distributed as dist

from slipstream.errors import MismatchError, ModelError, UsageError, warn
from slipstream.transport.consistency import (
    ROW_BYTES,
    collective_errors,
    different_verbs,
    verb_in,
)

LEAVE = timedelta(seconds=1)
"""How long an answer is awaited that nobody needs any more: a group that still waits for a rank
cannot be freed."""


class Agreement:
    """The steps of one pass, and how many ranks have a batch in each.

    It holds no group: one that outlives its session cannot be freed.

    Args:
        rank, ranks: this one, and how many there are.
        number: of the pass, the same on all of them.
        goes_on: whether batches before the first step were skipped, maybe all of a rank.
        rates: learning rates, which all ranks must have alike.

    Attributes:
        dummy_batch: whether this rank has no batch in the present step.
        content: a checksum of the batch of the first step, which ranks compare; 0: of none.
        asked_in: the thread that asks before each step; None: it asks where a promise ends alone.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        number: int,
        *,
        goes_on: bool = False,
        rates: Sequence[object] = (),
    ) -> None:
        self._goes_on, self._rates = goes_on, [*rates]
        # hosts may round a cosine in another way
        rounded = [f"{r:.6g}" if isinstance(r, float) else repr(r) for r in rates]
        self._mark = crc32(repr(rounded).encode())
        self._rank, self._ranks, self._number = rank, ranks, number
        self._steps = self._noted = self._used = 0
        self._agreed = 0
        """The first step for which there is no agreement yet."""
        self._ends = [0] * self._ranks
        """The step up to which each rank has promised batches."""
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._active, self._active_since = self._ranks, 0
        self.content = 0
        self.asked_in: Thread | None = None
        self._is_over = self._all_used = self.dummy_batch = False

    @property
    def promised(self) -> bool:
        """Whether this rank has promised a batch for the next step."""
        return self._ends[self._rank] > self._steps

    def next_step(self, promise: int, group: dist.ProcessGroup) -> bool:
        """Begin a step, if a rank has a batch.

        Args:
            group: the ranks, for CPU tensors.
            promise: how many batches this rank has for certain from here on.

        Raises:
            MismatchError: ranks are at different steps, or have other learning rates; on all of
                them.
            ModelError: some ranks have no batch at all; on all of them.
            ExchangeError: another rank is gone.
        """
        self._note()
        if self._steps == self._agreed:
            self._ask(promise, group)
            if not promise or not self._steps:  # else who has a batch computes with it meanwhile
                self.settle()
        if self._pending is None and max(self._ends) <= self._steps:
            return False
        self._steps += 1
        self.dummy_batch = not promise
        return True

    def settle(self) -> None:
        """Await who has a batch in the present step, if that is not known yet; raises as
        `next_step`."""
        if self._pending is not None:
            work, answers = self._pending
            with collective_errors("the comparison of the loaders"):
                work.wait()
            self._pending = None
            self._take(answers.view(self._ranks, -1).tolist())

    def use(self) -> int:
        """The number of ranks that have a batch in the step of the oldest batch that was not used
        yet; of all ranks, where that is none of this pass.

        Raises:
            UsageError: other ranks had a batch then than in the present step; or another thread
                asks, beside which this one would exchange in the same group.
        """
        other = self.asked_in
        if other not in (None, current_thread()) and other.is_alive():
            raise UsageError(
                "another thread takes batches from session.loader than calls backward(), and ranks "
                "agree on each batch, as the length of a loader is not certain: their exchanges "
                "would meet in another order. Take batches in the thread that calls backward(), "
                "put what reads ahead around the loader that accelerate() gets, or set "
                "data.prefetch"
            )
        self.settle()
        self._note()
        self._all_used = self._used == self._steps and self._is_over
        if self._all_used:
            self.dummy_batch = False
            return self._ranks
        if self._used < self._active_since:
            raise UsageError(
                f"{self._steps - self._used} batches were taken from session.loader since the last "
                f"backward(), and {self._active} of {self._ranks} ranks have one of their own by "
                "now: over how many ranks this loss is averaged is not known. Take one batch, call "
                "backward(), then step(), then take the next one (what no_sync() gathers counts as "
                "one batch: use gradients.accumulate; a batch that all ranks leave out needs its "
                "backward(), too, with optimizer.zero_grad() instead of step()); put what reads "
                "ahead around the loader that accelerate() gets, or give all ranks as many batches"
            )
        self._used = min(self._used + 1, self._steps)
        return self._active

    def has_batch(self, rank: int) -> bool:
        """Whether a rank counted in the last `use`."""
        return self._all_used or self._ends[rank] >= self._steps

    def end(self) -> None:
        """The loop was left, or has ended."""
        self._is_over = True
        if self._used == self._steps:
            self.dummy_batch = False

    def abandon(self) -> None:
        """Nobody asks any more."""
        if self._pending is not None:
            with suppress(RuntimeError):
                self._pending[0].wait(LEAVE)
            self._pending = None

    def _note(self) -> None:
        """Note how many ranks have a batch in the present step, and since which one."""
        if self._noted == self._steps:
            return
        self._noted = self._steps
        active = sum(end >= self._steps for end in self._ends)
        if active != self._active:
            self._active, self._active_since = active, self._steps - 1

    def _ask(self, promise: int, group: dist.ProcessGroup) -> None:
        mine = torch.tensor([self._number, self._steps, promise, self._mark, self.content, 0])
        assert mine.nbytes == ROW_BYTES  # another rank may be at a verb of the session instead
        answers = torch.empty(len(mine) * self._ranks, dtype=torch.int64)
        with collective_errors("the comparison of the loaders"):
            work = dist.all_gather(list(answers.split(len(mine))), mine, group=group, async_op=True)
        assert work is not None
        self._pending = work, answers

    def _take(self, answers: list[list[int]]) -> None:
        verbs = [verb_in(struct.pack("6q", *answer)) for answer in answers]
        if any(verb is not None for verb in verbs):
            raise different_verbs(verbs)
        number, step, _, mark, *_ = answers[0]
        for rank, (other_number, other_step, _, other_mark, *_) in enumerate(answers):
            if (other_number, other_step) != (number, step):
                raise MismatchError(
                    f"rank 0 asks session.loader for batch {step} of pass {number}, rank {rank} "
                    f"for batch {other_step} of pass {other_number}: all ranks must leave a loop "
                    "at the same batch (they are given as many)"
                )
            if other_mark != mark:
                raise MismatchError(
                    f"pass {number} of session.loader begins with other learning rates on rank "
                    f"{rank} than on rank 0 (on rank {self._rank}: {self._rates}), so their "
                    "updates would differ; step schedulers on every rank alike, and those that "
                    "look at a metric, as ReduceLROnPlateau, with its mean over ranks"
                )
        self._compare([content for *_, content, _ in answers])
        promises = [promise for _, _, promise, *_ in answers]
        empty = [rank for rank, promise in enumerate(promises) if not promise]
        if not step and not self._goes_on and 0 < len(empty) < self._ranks:
            raise ModelError(
                f"the loaders of ranks {empty} are empty while others hold batches; give every "
                "rank at least one batch, for instance by DistributedSampler(dataset, "
                "num_replicas=ranks, rank=rank) with rank, ranks = slipstream.data_share(), and no "
                "iterator that an earlier epoch has used up"
            )
        self._ends = [step + promise for promise in promises]
        self._agreed = step + min((promise for promise in promises if promise), default=0)

    def _compare(self, contents: Sequence[int]) -> None:
        """Warn, on the first rank, where some have the same batch."""
        times = Counter(contents)
        same = [
            str(rank) for rank, content in enumerate(contents) if content and times[content] > 1
        ]
        self.content = 0
        if same and not self._rank:
            warn(
                f"ranks {', '.join(same)} got the same first batch, bit for bit: they train on the "
                "same data, as one rank alone would. Unless that is meant (fewer samples than "
                "ranks; a script that takes its part of each batch itself), give each its share: "
                "rank, ranks = slipstream.data_share(), DataLoader(dataset, ..., "
                "sampler=DistributedSampler(dataset, num_replicas=ranks, rank=rank)), without "
                "shuffle=True",
            )
