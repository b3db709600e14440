"""What a script changes between two epochs reaches those who read ahead, as it reaches a loader's
own workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from slipstream.data.cache import cached
from slipstream.data.prefetch import prefetch
from slipstream.strategy import CacheConfig, PrefetchConfig
from tests.data.datasets import Scale, Scaled, generator

pytestmark = pytest.mark.process


class ScaledStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.transform: Any = Scale(1)

    def __iter__(self) -> Iterator[int]:
        return map(self.transform, range(5))


class TensorStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5.0))


def another(data: Scaled, epoch: int) -> None:
    data.transform = Scale(10**epoch)


def inside(data: Scaled, epoch: int) -> None:
    data.transform.factor = 10**epoch


def in_a_list(data: Scaled, epoch: int) -> None:
    data.pipeline[0].factor = 10**epoch


def a_tensor(data: Scaled, epoch: int) -> None:
    data.values.add_(epoch)


CHANGES = [another, inside, in_a_list, a_tensor]
SOURCES = {
    "threads": PrefetchConfig(threads=True, workers=1, depth=9),
    "workers": PrefetchConfig(workers=2, depth=4),
    "this process": PrefetchConfig(),
}
PARTS: dict[str, Callable[[Scaled], Dataset[torch.Tensor]]] = {
    "whole": lambda data: data,
    "a part": lambda data: Subset(data, [0, 1, 2, 3, 4]),
    "joined": lambda data: ConcatDataset([data, data]),
}


def seen(loader: Any, data: Any, change: Callable[[Any, int], None]) -> list[Any]:
    torch.manual_seed(0)
    batches = []
    for epoch in range(3):
        change(data, epoch)
        batches += [[int(value) for value in batch] for batch in loader]
    return [*batches, torch.rand(()).item()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_set_between_epochs_is_read(source: str, change: Any) -> None:
    check(SOURCES[source], change, "whole")


@pytest.mark.parametrize("part", PARTS)
def test_what_is_set_on_a_dataset_inside_is_read(part: str) -> None:
    check(SOURCES["threads"], another, part)


def check(config: PrefetchConfig, change: Any, part: str) -> None:
    def loader_of(data: Scaled) -> DataLoader[torch.Tensor]:
        return DataLoader(PARTS[part](data), batch_size=2, shuffle=True, generator=generator())

    data = Scaled()
    expected = seen(loader_of(data), data, change)
    data = Scaled()
    ahead = prefetch(loader_of(data), config)
    assert seen(ahead, data, change) == expected
    ahead.close()


class Collate:
    """Samples put together by a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return self.factor * torch.stack(samples)


def collated_otherwise(loader: DataLoader[Any], epoch: int) -> None:
    collate: Any = loader.collate_fn
    collate.factor = 10**epoch


def another_collate(loader: DataLoader[Any], epoch: int) -> None:
    loader.collate_fn = Collate(10**epoch)


@pytest.mark.parametrize("change", [collated_otherwise, another_collate])
@pytest.mark.parametrize("source", [*SOURCES, "a stream"])
def test_how_batches_are_put_together_may_change_between_epochs(source: str, change: Any) -> None:
    def loader_of() -> DataLoader[Any]:
        data = TensorStream() if source == "a stream" else Scaled()
        return DataLoader(data, batch_size=2, num_workers=0, collate_fn=Collate(1))

    loader = loader_of()
    expected = seen(loader, loader, change)
    loader = loader_of()
    ahead = prefetch(loader, SOURCES.get(source, PrefetchConfig()))
    assert seen(ahead, loader, change)[:-1] == expected[:-1]
    ahead.close()


def test_what_is_set_on_a_stream_is_read() -> None:
    data = ScaledStream()
    expected = seen(DataLoader(data, batch_size=2), data, another)
    data = ScaledStream()
    ahead = prefetch(DataLoader(data, batch_size=2), PrefetchConfig())
    assert seen(ahead, data, another)[:-1] == expected[:-1]
    ahead.close()


@pytest.mark.parametrize("keeps", [False, True], ids=["read", "cached"])
def test_workers_stay_where_nothing_was_set(keeps: bool, tmp_path: Path) -> None:
    data: Any = Scaled()
    if keeps:
        data = cached(data, CacheConfig(folder=str(tmp_path), gigabytes=0.01))
    ahead = prefetch(DataLoader(data, batch_size=2), PrefetchConfig(threads=True, workers=1))
    for _ in range(2):
        list(ahead)
    source = ahead._reader._source  # type: ignore[union-attr]
    list(ahead)
    assert ahead._reader._source is source  # type: ignore[union-attr]
    ahead.close()
    if keeps:
        data.close()


class Shared(Dataset[int]):
    """Its epoch lies in memory that it shares with workers."""

    def __init__(self) -> None:
        self.value = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.value.value


class SharedEpoch(Shared):
    def set_epoch(self, epoch: int) -> None:
        self.value.value = epoch


@pytest.mark.parametrize("kind", [Shared, SharedEpoch])
def test_what_is_set_in_shared_memory_is_read(kind: type[Shared]) -> None:
    """Also by workers that live on, if the dataset is told its epoch."""
    workers = {"num_workers": 1, "persistent_workers": True} if kind is SharedEpoch else {}
    data: Any = kind()
    loader: Any = DataLoader(data, batch_size=5, **workers)
    ahead = prefetch(loader, PrefetchConfig(threads=True, workers=1))
    for epoch in range(3):
        data.value.value = epoch
        assert [batch.tolist() for batch in ahead] == [[100 * epoch + i for i in range(5)]]
    ahead.close()
