"""The loop that habits are written against, and its two sides: plain torch and a technique.

A habit is one function of a `Loop`. It is run twice, with the same batches: by `Plain`, which is
one process that trains on the batches of all ranks, and by a loop of a technique on each rank. What
the two have noted, and the model in the end, must be equal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from tests.conformance.models import Net

if TYPE_CHECKING:
    from tests.conformance.techniques import Technique

BATCH, BATCHES = 4, 8
"""Samples of a batch, and batches of a rank's epoch."""


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    rank: int
    """Whose batch it is."""
    counts: bool = True
    """False: computed in forward alone."""


LossOf = Callable[[nn.Module, Batch], "Tensor | tuple[Tensor, ...]"]


def mse(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of all habits that have none of their own."""
    return F.mse_loss(model(batch.x).to(batch.y.dtype), batch.y)


def square(output: Tensor, target: Tensor) -> Tensor:
    """The same for a pipeline."""
    return F.mse_loss(output.to(target.dtype), target)


class Samples(list[tuple[Tensor, Tensor]]):
    """A dataset."""


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without a length, or with one that it only says; ``end`` None: never over."""

    def __init__(self, samples: Samples, end: int | None) -> None:
        self.samples, self.end = samples, end

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        taken = 0
        while self.end is None or taken < self.end:
            yield self.samples[taken % len(self.samples)]
            taken += 1


class Says(Stream):
    def __init__(self, samples: Samples, end: int | None, says: int) -> None:
        super().__init__(samples, end)
        self.says = says

    def __len__(self) -> int:
        return self.says


class Loader(NamedTuple):
    """How the batches of each rank come: so many; as a stream; with a length that is said."""

    batches: tuple[int | None, ...] = (BATCHES, BATCHES)
    stream: bool = False
    says: int | None = None

    def of(self, rank: int, samples: Samples) -> DataLoader[Any]:
        count = self.batches[rank % len(self.batches)]
        end = None if count is None else BATCH * count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.says is not None:
                return DataLoader(Says(samples, end, BATCH * self.says), BATCH)
            if self.stream:
                return DataLoader(Stream(samples, end), BATCH)
            return DataLoader(Samples(samples[:end]), BATCH)


def samples_of(shape: Sequence[int], rank: int) -> Samples:
    drawn = Samples()
    for index in range(BATCH * BATCHES):
        seed = torch.Generator().manual_seed(100 * index + rank)
        drawn.append((torch.randn(*shape, generator=seed), torch.randn(4, generator=seed)))
    return drawn


class Loop:
    """The objects of a user, the verbs of a loop, and what is noted on the way.

    ``model`` and ``optimizer`` are made when a habit first asks for them, so that it can change the
    model before.
    """

    plain = False
    accumulate = 1

    def __init__(self, technique: Technique, rank: int, ranks: int) -> None:
        self.technique, self.rank, self.ranks = technique, rank, ranks
        self.noted: list[tuple[str, Tensor]] = []
        self.warned: list[str] = []
        self.loader = Loader()
        self._computing: int | None = None
        self._feeds: dict[int, Iterator[Any]] = {}

    @cached_property
    def model(self) -> Net:
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes ten times as long
        return Net(self.technique.body(fast=not self.plain))

    @cached_property
    def optimizer(self) -> Optimizer:
        return self.technique.optimizer(self.model)

    # What a habit calls.

    def start(self, *, accumulate: int | None = None, unused: bool = False) -> None:
        """Train with the technique from here on. ``unused``: some parameters get no gradient."""
        raise NotImplementedError

    def close(self) -> None:
        """Train without it from here on."""
        raise NotImplementedError

    def backward(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        """Gradients of the next batch; several losses of one forward where it gives several."""
        raise NotImplementedError

    def step(self) -> bool:
        """Update and zero, unless a window is open."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Update by what an open window holds."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> None:
        raise NotImplementedError

    def epoch(self, limit: int | None = None) -> int:
        """A pass over the loader; how many updates it made."""
        raise NotImplementedError

    def gradients(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        """All backward passes of an update."""
        for micro in range(self.accumulate):
            self.backward(loss_of, scale=scale)
            if micro < self.accumulate - 1:
                self.step()

    def update(self, loss_of: LossOf = mse, *, times: int = 1, scale: float = 1.0) -> None:
        for _ in range(times):
            self.gradients(loss_of, scale=scale)
            self.step()

    def alone(self, *, times: int = 1) -> None:
        """After `close`: updates of plain torch by the first rank's batches, alike on all ranks."""
        for x, y in self._samples(0)[:times]:
            self.optimizer.zero_grad()
            two = Batch(torch.stack([x, 0.5 * x]), torch.stack([y, y]), self.rank)
            mse(self.model, two).backward()
            self.optimizer.step()

    def second(self) -> Loop:
        """Another training of the same kind in this process."""
        return type(self)(self.technique, self.rank, self.ranks)

    def trained(self, updates: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of model and optimizer after a plain run of so many updates."""
        run = Plain(self.technique, self.rank, self.ranks)
        run.start()
        run.update(times=updates)
        states = run.model.state_dict(), run.optimizer.state_dict()
        return copy.deepcopy(states)

    def load_from_other_world(self) -> None:
        """Go on where a run on one process has ended, by the session's own verbs."""
        raise NotImplementedError

    def note(self, name: str, *values: Tensor | float | bool) -> None:
        """What both sides must have in common; of the own batch alone."""
        if self._computing in (None, self.rank):
            for value in values:
                given = value if isinstance(value, Tensor) else torch.tensor(float(value))
                self.noted.append((name, given.detach().clone()))

    def note_model(self, name: str, model: nn.Module) -> None:
        self.note(name, *model.state_dict().values())

    # What the matrix calls.

    def end(self) -> None:
        """Close what a habit has left open."""
        self.close()

    def abandon(self, error: BaseException) -> None:
        """The training has failed."""

    def _samples(self, rank: int) -> Samples:
        dtype = torch.get_default_dtype()
        drawn = samples_of(self.technique.shape, rank)
        drawn = Samples(drawn[:BATCH]) if self.technique.deals else drawn
        return Samples((x.to(dtype), y.to(dtype)) for x, y in drawn)

    def _loader_of(self, rank: int) -> DataLoader[Any]:
        return self.loader.of(rank, self._samples(rank))

    def _next(self, rank: int, loader: Any) -> Batch:
        for _ in range(2):
            if rank not in self._feeds:
                self._feeds[rank] = iter(loader)
            try:
                x, y = next(self._feeds[rank])
            except StopIteration:
                del self._feeds[rank]
            else:
                return Batch(x, y, rank)
        raise AssertionError("an empty loader")


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
        before = {id(m): dict(m._buffers) for m in self.model.modules()}
        errors: list[BaseException] = []
        for batch in reversed(batches):  # so that buffers are the first rank's in the end
            for module in self.model.modules():
                for name, buffer in before.get(id(module), {}).items():
                    module._buffers[name] = None if buffer is None else buffer.clone()
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

    def flush(self) -> bool:
        open_ = self._micro % self.accumulate
        for parameter in self.model.parameters() if open_ else ():
            if parameter.grad is not None:
                parameter.grad *= self.accumulate / open_
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
        model, optimizer = self.trained(2)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class InSession(Loop):
    """The same by `slipstream.accelerate`."""

    session: Any = None

    def start(self, *, accumulate: int | None = None, unused: bool = False) -> None:
        import slipstream

        self.accumulate = accumulate or self.technique.accumulate
        strategy = self.technique.strategy_for(self.model)
        if self.accumulate > 1:
            strategy["gradients"] = {**strategy.get("gradients", {}), "accumulate": self.accumulate}
        loader = self.technique.loader(self)
        self.technique.prepare(self)
        self.session = slipstream.accelerate(self.model, self.optimizer, loader, strategy)
        self._feeds.clear()

    def close(self) -> None:
        self._feeds.clear()
        self.session.close()
        self.technique.undo(self)

    def end(self) -> None:
        if not self.session._closed:
            self.close()

    def abandon(self, error: BaseException) -> None:
        self._feeds.clear()
        if self.session is not None:
            self.session.__exit__(type(error), error, error.__traceback__)

    def backward(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        self._backward(self._next(self.rank, self.session.loader), loss_of, scale)

    def _backward(self, batch: Batch, loss_of: LossOf, scale: float = 1.0) -> None:
        losses = loss_of(self.session.model, batch)
        each = losses if isinstance(losses, tuple) else (losses,)
        for number, loss in enumerate(each, 1):
            scaled = loss * scale if scale != 1.0 else loss
            self.session.backward(scaled, retain_graph=number < len(each), loss_scale=scale)

    def step(self) -> bool:
        return bool(self.session.step())

    def flush(self) -> bool:
        return bool(self.session.flush())

    def clip(self, max_norm: float) -> None:
        self.note("norm", self.session.clip_grad_norm_(max_norm))

    def epoch(self, limit: int | None = None) -> int:
        updates = 0
        for x, y in self.session.loader:
            self._backward(Batch(x, y, self.rank), mse)
            updates += self.step()
            if updates == limit:
                break
        return updates

    def load_from_other_world(self) -> None:
        saved = self.technique.of_one_process()
        self.session.load_full_state_dict(saved["model"])
        self.session.load_full_optimizer_state_dict(saved["optimizer"])
        if "session" in saved:
            self.session.load_state_dict(saved["session"])


class InPipeline(InSession):
    """A model cut into stages: forward, loss and backward are one call."""

    def _backward(self, batch: Batch, loss_of: LossOf, scale: float = 1.0) -> None:
        if loss_of is mse:
            self.session.forward_backward(square, (batch.x,), target=batch.y, loss_scale=scale)
        else:
            super()._backward(batch, loss_of, scale)


class UnderDdp(Loop):
    """DistributedDataParallel with a codec of ours as its hook."""

    ddp: Any = None
    hook: Any = None

    def start(self, *, accumulate: int | None = None, unused: bool = False) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from slipstream.ddp import DdpCodec, codec_hook

        self.accumulate = accumulate or self.technique.accumulate
        optimizer = self.optimizer
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=unused)
        codec = self.technique.strategy["gradients"]["codec"]
        takes = isinstance(codec, Mapping) and codec["kind"] == "dgc"
        self.hook = DdpCodec(self.ddp, codec, optimizer=optimizer if takes else None)
        self.ddp.register_comm_hook(self.hook, codec_hook)
        self._micro, self._loader = 0, self._loader_of(self.rank)

    def close(self) -> None:
        import torch.distributed as dist

        if self.hook is not None:
            self.hook.close()
            for buffer in self.model.buffers():  # DDP would, when the next forward begins
                dist.broadcast(buffer, 0)
        self.hook = self.ddp = None

    def abandon(self, error: BaseException) -> None:
        if self.hook is not None:
            self.hook.close()

    def backward(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        batch = self._next(self.rank, self._loader)
        self.ddp.require_backward_grad_sync = (self._micro + 1) % self.accumulate == 0
        losses = loss_of(self.ddp, batch)
        total = torch.stack(losses).sum() if isinstance(losses, tuple) else losses
        (total * scale / self.accumulate).backward()

    def gradients(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        self._micro = 0
        super().gradients(loss_of, scale=scale)
        if scale != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale

    def step(self) -> bool:
        self._micro += 1
        if self._micro % self.accumulate:
            return False
        finite = all(
            bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None
        )
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite

    def clip(self, max_norm: float) -> None:
        self.note("norm", nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))
