"""Datasets of numbers, and a training that tells what it has seen."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Config = dict[str, Any]


class Numbers(Dataset[int]):
    """Its samples are their indices; counts how often each was read."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, Counter[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        return index


class Waits(Numbers):
    """One of its samples waits to be let go, in a thread or a process."""

    def __init__(self, size: int, at: int) -> None:
        super().__init__(size)
        self.at, self.goes_on = at, multiprocessing.Event()

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.goes_on.wait(60)
        return index


class Scale:
    """A transform with a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: Any) -> Any:
        return self.factor * value


class Scaled(Dataset[torch.Tensor]):
    """Rising numbers, with transforms that can be changed."""

    def __init__(self, size: int = 8) -> None:
        self.transform: Any = Scale(1)
        self.values = torch.arange(float(size))
        self.pipeline = [Scale(1)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        scaled: torch.Tensor = self.pipeline[0](self.transform(self.values[index]))
        return scaled


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def run(
    loader: Any,
    lengths: list[int | None],
    *,
    sets_epoch: bool,
    draws: bool,
    seeds_at: int | None = None,
) -> list[Any]:
    """Some epochs of a training, each left after so many batches; what it sees, and the random
    numbers that it draws."""
    torch.manual_seed(0)
    seen: list[Any] = []
    sampler = loader.sampler if hasattr(loader.sampler, "set_epoch") else loader.batch_sampler
    for epoch, length in enumerate(lengths):
        if epoch == seeds_at:
            torch.manual_seed(3)
        if sets_epoch and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(2 * epoch if epoch > 2 else epoch)
        batches = iter(loader)
        for batch in islice(batches, length):
            seen.append(batch.tolist())
            if draws:
                seen.append(torch.rand(()).item())
        del batches
        seen.append(torch.rand(()).item() if draws else None)
    own = getattr(loader.sampler, "generator", None)
    states = [torch.get_rng_state(), *([own.get_state()] if own is not None else [])]
    return [*seen, *(state.tolist() for state in states)]


class Stream(IterableDataset[int]):
    """Its samples are numbers; a worker takes its share."""

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size, self.fails_at = size, fails_at

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.size, step):
            if number == self.fails_at:
                raise ValueError("a bad sample")
            yield number
