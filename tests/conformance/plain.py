"""The side that is right: plain torch in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.conformance.loop import Batch, Loop, LossOf, mse

if TYPE_CHECKING:
    from tests.conformance.techniques import Technique


class Plain(Loop):
    """Plain torch in one process: losses of all ranks' batches, their mean, one update.

    Buffers are those that the first rank would have.
    """

    plain = True

    def __init__(self, technique: Technique, rank: int, ranks: int) -> None:
        super().__init__(technique, rank, ranks)
        self._micro = 0
        self._overflowed = False
        self.trajectory: list[dict[str, Tensor]] = []
        self._loaders: dict[int, Any] = {}
        self._window: list[list[Batch]] = []

    def start(self, *, accumulate: int | None = None, unused: bool = False) -> None:
        self.accumulate = accumulate or self.technique.accumulate
        self.remember()
        self.optimizer.register_step_post_hook(lambda *_: self.remember())

    def remember(self) -> None:
        """Where the model is allowed to be."""
        self.trajectory.append({n: p.detach().clone() for n, p in self.model.named_parameters()})

    def close(self) -> None:
        self._feeds.clear()

    def backward(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        self._backward([self._next(rank, self._loader(rank)) for rank in self._data_ranks], loss_of)

    @property
    def _data_ranks(self) -> range:
        return range(1 if self.technique.shares_batches else self.ranks)

    def _loader(self, rank: int) -> Any:
        if rank not in self._loaders:
            self._loaders[rank] = self._loader_of(rank)
        return self._loaders[rank]

    def _backward(
        self, batches: Sequence[Batch], loss_of: LossOf, divisor: int | None = None
    ) -> None:
        """Gradients of the mean over these batches, or of their sum by ``divisor``."""
        divisor = divisor or len(batches) * self.accumulate
        self.remember()  # what the user has written
        before = self._buffers()
        errors: list[BaseException] = []
        for batch in reversed(batches):  # so that buffers are the first rank's in the end
            self._give(before)
            own = batch._replace(rank=self.rank) if self.technique.shares_batches else batch
            self._computing = own.rank
            try:
                with self.technique.around_forward():
                    losses = loss_of(self.model, own)
                total = torch.stack(losses).sum() if isinstance(losses, tuple) else losses
                self._overflowed |= not bool(total.isfinite())
                if batch.counts:
                    (total / divisor).backward()
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
            finally:
                self._computing = None
        if errors:
            raise errors[-1]

    def _buffers(self) -> dict[int, dict[str, Tensor | None]]:
        return {id(m): dict(m._buffers) for m in self.model.modules()}

    def _give(self, buffers: dict[int, dict[str, Tensor | None]]) -> None:
        """Begin a forward with copies of these."""
        for module in self.model.modules():
            for name, buffer in buffers.get(id(module), {}).items():
                module._buffers[name] = None if buffer is None else buffer.clone()

    def look(self) -> None:
        pass

    def loss(self) -> Tensor:
        batches = [self._next(rank, self._loader(rank)) for rank in self._data_ranks]
        before, losses = self._buffers(), []
        for batch in reversed(batches):
            self._give(before)
            with self.technique.around_forward():
                losses.append(mse(self.model, batch))
        return torch.stack(losses).mean()

    def averaged(self, gradient: Tensor) -> Tensor:
        return gradient

    def gradients(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        self._micro = 0
        super().gradients(loss_of, scale=scale)

    def step(self) -> bool:
        self._micro += 1
        if self._micro % self.accumulate:
            return False
        skipped, self._overflowed = self._overflowed, False
        if not skipped:
            self.optimizer.step()
        self.model.zero_grad()
        return not skipped

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def flush(self, max_norm: float | None = None) -> bool:
        open_ = self._micro % self.accumulate
        for parameter in self.model.parameters() if open_ else ():
            if parameter.grad is not None:
                parameter.grad *= self.accumulate / open_
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self._micro = self.accumulate - 1
        return self.step()

    def clip(self, max_norm: float) -> None:
        self.note("norm", nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def epoch(self, limit: int | None = None) -> int:
        """An update is the mean over the batches that exist in its window."""
        updates = 0
        for batches in self._rounds_of_an_epoch():
            if updates == limit:
                break
            self._window.append(batches)
            if len(self._window) < self.accumulate:
                continue
            count = sum(batch.counts for batches in self._window for batch in batches)
            for each in self._window:
                self._backward(each, mse, divisor=count)
            self._window.clear()
            self.optimizer.step()
            self.model.zero_grad()
            updates += 1
        return updates

    def _rounds_of_an_epoch(self) -> Iterator[list[Batch]]:
        """The batches of all ranks; of a rank that has run out its last one again, which does not
        count, but which its buffers see."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            iterators = {rank: iter(self._loader_of(rank)) for rank in self._data_ranks}
            last: dict[int, Batch] = {}
            while True:
                for rank, iterator in iterators.items():
                    found = next(iterator, None)
                    if found is None:
                        last[rank] = last[rank]._replace(counts=False)
                    else:
                        x, y = found
                        last[rank] = Batch(x, y, rank)
                if not any(batch.counts for batch in last.values()):
                    return
                yield [*last.values()]

    def load_from_other_world(self) -> None:
        model, optimizer = trained(self)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def trained(run: Loop) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer after a plain run of two updates."""
    plain = Plain(run.technique, run.rank, run.ranks)
    plain.start()
    plain.update(times=2)
    return copy.deepcopy((plain.model.state_dict(), plain.optimizer.state_dict()))
