"""The loop that habits are written against; its sides are in ``plain`` and ``sides``.

A habit is one function of a `Loop`. It is run twice, with the same batches: by `Plain`, which is
one process that trains on the batches of all ranks, and by a loop of a technique on each rank. What
the two have noted, and the model in the end, must be equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    """A dataset, of samples of one length."""

    @property
    def lengths(self) -> list[int]:
        return [1] * len(self)


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

    def flush(self, max_norm: float | None = None) -> bool:
        """Update by what an open window holds, clipped if asked."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients stay on their rank."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> None:
        raise NotImplementedError

    def epoch(self, limit: int | None = None) -> int:
        """A pass over the loader; how many updates it made."""
        raise NotImplementedError

    def look(self) -> None:
        """Take the first batch of a pass that is not made."""
        raise NotImplementedError

    def loss(self) -> Tensor:
        """The loss of the next batch, for a script that computes gradients by itself."""
        raise NotImplementedError

    def averaged(self, gradient: Tensor) -> Tensor:
        """What a script makes of a gradient of its own: the mean over ranks."""
        import torch.distributed as dist

        dist.all_reduce(gradient)
        return gradient / self.ranks

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
