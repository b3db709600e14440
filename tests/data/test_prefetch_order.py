"""Prefetch: the batches, their order and the random numbers around them are those of the loader."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from slipstream.data.balance import BalancedBatches
from slipstream.data.prefetch import prefetch
from slipstream.errors import DataError
from slipstream.strategy import PrefetchConfig
from tests.data.datasets import Config, Numbers, Stream, generator, run

LOADERS: dict[str, Callable[[Dataset[int], Config], DataLoader[Any]]] = {
    "in order": lambda data, how: DataLoader(data, **how),
    "shuffled": lambda data, how: DataLoader(data, shuffle=True, **how),
    "shuffled, own generator": lambda data, how: DataLoader(
        data, shuffle=True, generator=generator(), **how
    ),
    "drawn with replacement": lambda data, how: DataLoader(
        data, sampler=RandomSampler(data, replacement=True, generator=generator()), **how
    ),
    "weighted": lambda data, how: DataLoader(
        data, sampler=WeightedRandomSampler([1.0 + i for i in range(len(data))], len(data)), **how
    ),
    "weighted, the loader's generator": lambda data, how: DataLoader(
        data,
        sampler=WeightedRandomSampler([1.0 + i for i in range(len(data))], len(data)),
        generator=generator(),
        **how,
    ),
    "batches of a shuffle": lambda data, how: DataLoader(
        data,
        batch_sampler=BatchSampler(RandomSampler(data, generator=generator()), **how),
    ),
    "a share": lambda data, how: DataLoader(
        data, sampler=DistributedSampler(data, num_replicas=2, rank=1), **how
    ),
    "dealt": lambda data, how: DataLoader(
        data,
        batch_sampler=BalancedBatches(
            [1 + i % 5 for i in range(len(data))],
            rank=0,
            ranks=2,
            batch_size=2 * how["batch_size"],
        ),
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("lengths", [[None, 1], [None, 2]], ids=str)
def test_a_script_seeds_before_a_pass_that_was_drawn_ahead(
    kind: str, lengths: list[int | None]
) -> None:
    how: Config = {"batch_size": 1, "drop_last": False}
    options: Config = {"sets_epoch": True, "draws": False, "seeds_at": 1}
    expected = run(LOADERS[kind](Numbers(4), how), lengths, **options)
    ahead = prefetch(
        LOADERS[kind](Numbers(4), how), PrefetchConfig(threads=True, workers=2, depth=1)
    )
    try:
        assert run(ahead, lengths, **options) == expected
    finally:
        ahead.close()


@settings(max_examples=150)
@given(
    kind=st.sampled_from(sorted(LOADERS)),
    size=st.integers(2, 40),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    lengths=st.lists(st.none() | st.integers(1, 4), min_size=1, max_size=6),
    sets_epoch=st.booleans(),
    draws=st.booleans(),
    seeds_at=st.none() | st.integers(0, 3),
    depth=st.integers(1, 30),
)
def test_batches_and_random_numbers_are_those_of_the_loader(
    kind: str,
    size: int,
    batch_size: int,
    drop_last: bool,
    lengths: list[int | None],
    sets_epoch: bool,
    draws: bool,
    seeds_at: int | None,
    depth: int,
) -> None:
    how: Config = {"batch_size": batch_size, "drop_last": drop_last}
    if kind == "dealt":
        how["drop_last"] = False
    options: Config = {"sets_epoch": sets_epoch, "draws": draws, "seeds_at": seeds_at}
    expected = run(LOADERS[kind](Numbers(size), how), lengths, **options)
    config = PrefetchConfig(threads=True, workers=2, depth=depth)
    ahead = prefetch(LOADERS[kind](Numbers(size), how), config)
    try:
        assert run(ahead, lengths, **options) == expected
    finally:
        ahead.close()


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "shuffled, own generator", "a share"])
def test_workers_give_the_same_batches(kind: str, persistent: bool) -> None:
    how: Config = {"batch_size": 3, "num_workers": 2, "persistent_workers": persistent}
    options: Config = {"sets_epoch": True, "draws": False}
    lengths = [None, None, 2, None, None]
    expected = run(LOADERS[kind](Numbers(20), how), lengths, **options)
    ahead = prefetch(LOADERS[kind](Numbers(20), how), PrefetchConfig(workers=2))
    try:
        assert run(ahead, lengths, **options) == expected
    finally:
        ahead.close()


class Crashing(Numbers):
    """A sample of it cannot be read: an exception, or the end of the process that reads it."""

    def __init__(self, size: int, bad: int | None, kills: bool = False) -> None:
        super().__init__(size)
        self.bad, self.kills = bad, kills

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad sample")
        return index


def passes(loader: Any, lengths: list[int | None]) -> list[Any]:
    """What a training sees that goes on with the next epoch after a crash, and the random numbers
    that it would draw then."""
    torch.manual_seed(0)
    seen: list[Any] = []
    said: list[str] = []
    for epoch, length in enumerate(lengths):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        seen.append([])
        try:
            for batch in islice(loader, length):
                seen[-1].append(batch.tolist())
        except ValueError:
            seen[-1].append("crash")
        except DataError as error:
            seen[-1].append("crash")
            said.append(str(error))
    seen.append(torch.rand(()).item())
    own = getattr(loader.sampler, "generator", None)
    seen.append(None if own is None else own.get_state().tolist())
    assert all("DataLoader worker" in text for text in said)
    assert all("were awaited" in text for text in said)
    return seen


LEFT_BEFORE = {"kind": "in order", "size": 6, "batch_size": 1, "workers": 1, "lengths": [1, 1]}
IN_THE_MIDDLE = {"size": 6, "batch_size": 1, "workers": 1, "lengths": [None], "bad": 2}


@pytest.mark.process
@pytest.mark.usefixtures("no_plain_loader")
@settings(max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a crash is slow
@example(**LEFT_BEFORE, threads=True, bad=2, kills=False)
@example(**LEFT_BEFORE, threads=False, bad=2, kills=False)
@example(**IN_THE_MIDDLE, kind="shuffled, own generator", threads=True, kills=False)
@given(
    kind=st.sampled_from(
        ["in order", "shuffled", "shuffled, own generator", "weighted", "a share"]
    ),
    size=st.integers(2, 30),
    batch_size=st.integers(1, 7),
    workers=st.integers(1, 2),
    threads=st.booleans(),
    lengths=st.lists(st.none() | st.integers(1, 3), min_size=1, max_size=4),
    bad=st.none() | st.integers(0, 29),
    kills=st.booleans(),
)
def test_batches_come_in_order_up_to_the_one_that_a_crash_takes(
    kind: str,
    size: int,
    batch_size: int,
    workers: int,
    threads: bool,
    lengths: list[int | None],
    bad: int | None,
    kills: bool,
) -> None:
    """In every pass, also after others that were left early or crashed.

    A worker that is killed takes batches with it that it has read and not sent yet.
    """
    how: Config = {"batch_size": batch_size}
    expected = passes(LOADERS[kind](Crashing(size, bad), how), lengths)
    data = Crashing(size, bad, kills=kills and not threads)
    ahead = prefetch(LOADERS[kind](data, how), PrefetchConfig(workers=workers, threads=threads))
    try:
        seen = passes(ahead, lengths)
    finally:
        ahead.close()
    if data.kills:
        for index, batches in enumerate(seen[:-2]):
            if batches[-1:] == ["crash"]:
                expected[index] = [*expected[index][: len(batches) - 1], "crash"]
                if kind not in ("in order", "a share"):  # how far it was drawn differs from here
                    seen, expected = seen[: index + 1], expected[: index + 1]
                    break
    assert seen == expected


def test_two_iterators_at_once_are_two_passes() -> None:
    loader = prefetch(DataLoader(Numbers(6), batch_size=2), PrefetchConfig(threads=True, workers=1))
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]
    assert loader.report_rows()[0].value.startswith("1 thread")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.close()


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("draws", [False, True])
def test_a_stream_gives_the_same_batches(workers: int, draws: bool) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Stream(11), batch_size=2, num_workers=workers)

    def epochs(loader: Any) -> list[Any]:
        return run(loader, [None, 2, None, None], sets_epoch=False, draws=draws)

    ahead = prefetch(loader())
    try:
        assert epochs(ahead) == epochs(loader())
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(ahead, ahead, strict=True)]
        assert all(a == b for a, b in pairs)
    finally:
        ahead.close()


def test_single_samples_and_datasets_that_read_whole_batches() -> None:
    class Whole(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

    config = PrefetchConfig(threads=True, workers=1)
    for data, how, expected in (
        (Numbers(3), {"batch_size": None}, [0, 1, 2]),
        (Whole(3), {"batch_size": 2}, [[0, 10], [20]]),
    ):
        loader = prefetch(DataLoader(data, **how), config)
        assert [getattr(b, "tolist", lambda b=b: b)() for b in loader] == expected
        loader.close()


class EveryOther:
    """A sampler of one's own, that counts its passes."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(self.passes % 2, 6, 2))

    def __len__(self) -> int:
        return 3


def test_a_sampler_of_ones_own_is_asked_when_its_epoch_begins() -> None:
    sampler = EveryOther()
    loader = prefetch(
        DataLoader(Numbers(6), sampler=sampler), PrefetchConfig(threads=True, workers=1)
    )
    for passes in (1, 2, 3):
        assert [int(batch) for batch in loader] == [*range(passes % 2, 6, 2)]
        assert sampler.passes == passes
    assert "the sampler's order depends on is not known" in loader.report_rows()[0].note
    loader.close()


class Epochs(Stream):
    """A stream that is told its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (100 * self.epoch + number for number in super().__iter__())


class EpochsOfSamples(Numbers):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.process
@pytest.mark.parametrize("dataset", [Epochs(3), EpochsOfSamples(3)], ids=["stream", "samples"])
def test_a_dataset_that_is_told_its_epoch_tells_it_its_workers(dataset: Any) -> None:
    loader = prefetch(DataLoader(dataset, num_workers=1))
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert [int(batch) - 100 * epoch for batch in loader] == [0, 1, 2]
    loader.close()


class AtOnce(Sampler[list[int]]):
    """Draws batches when it is asked for an iterator, as many of scripts do."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(8).view(4, 2).tolist())


@pytest.mark.process
@pytest.mark.parametrize("lives_on", [False, True])
def test_a_sampler_that_draws_at_once_is_asked_as_often_as_by_the_loader(lives_on: bool) -> None:
    def seen(ahead: bool) -> list[Any]:
        torch.manual_seed(0)
        loader: Any = DataLoader(
            Numbers(8), batch_sampler=AtOnce(), num_workers=1, persistent_workers=lives_on
        )
        if ahead:
            loader = prefetch(loader, PrefetchConfig(threads=True, workers=1))
        found = [[batch.tolist() for batch in loader] for _ in range(3)]
        if ahead:
            loader.close()
        return [*found, torch.rand(()).item()]

    assert seen(ahead=True) == seen(ahead=False)
