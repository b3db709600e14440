"""Prefetch: the batches, their order and the random numbers around them are those of the loader."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import slipstream
from slipstream.data.balance import BalancedBatches
from slipstream.data.prefetch import PrefetchLoader, prefetch
from slipstream.errors import DataError, ModelError, UsageError
from slipstream.strategy import Prefetch
from slipstream.trace import read

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


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


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
    seen.append(torch.get_rng_state().tolist())
    return seen


@settings(max_examples=300)
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
    options: Config = {"sets_epoch": sets_epoch, "draws": draws, "seeds_at": seeds_at}
    if kind == "drawn with replacement":  # batch by batch: how far depends on how far it is read
        lengths = [None for _ in lengths]
    expected = run(LOADERS[kind](Numbers(size), how), lengths, **options)
    config = Prefetch(threads=True, workers=2, depth=depth)
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
    ahead = prefetch(LOADERS[kind](Numbers(20), how), Prefetch(workers=2))
    try:
        assert run(ahead, lengths, **options) == expected
    finally:
        ahead.close()


def pids(loader: PrefetchLoader) -> set[int]:
    return {int(batch[0]) for batch in loader}


class Pids(Numbers):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.process
def test_workers_live_on_from_epoch_to_epoch() -> None:
    loader = prefetch(DataLoader(Pids(8), batch_size=2), Prefetch(workers=2))
    try:
        first, second = pids(loader), pids(loader)
        assert first == second
        assert len(first) == 2
        assert os.getpid() not in first
    finally:
        loader.close()


def test_the_next_epoch_is_read_before_this_one_ends() -> None:
    data = Numbers(8)
    loader = prefetch(DataLoader(data, batch_size=2), Prefetch(threads=True, workers=1, depth=3))
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    deadline = time.monotonic() + 10
    while data.reads.total() < 8 + 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert data.reads == Counter([*range(8), *range(6)])
    assert next(iter(loader)).tolist() == [0, 1]
    loader.close()


def test_nothing_is_read_twice_or_lost() -> None:
    data = Numbers(10)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loading = DataLoader(data, batch_size=3, sampler=sampler)
    loader = prefetch(loading, Prefetch(threads=True, workers=1, depth=2))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 4
    loader.close()
    assert all(4 <= count <= 5 for count in data.reads.values())  # a fifth epoch was begun
    assert sum(data.reads.values()) <= 4 * 10 + 2 * 3


def test_what_the_training_draws_from_makes_the_next_order_unknown_and_the_report_says_so() -> None:
    data = Numbers(6)
    loader = prefetch(DataLoader(data, batch_size=2, shuffle=True), Prefetch(threads=True))
    for _ in range(3):
        for _ in loader:
            torch.rand(())
    [row] = loader.report_rows()
    assert "give the DataLoader a generator of its own" in row.note
    reads = data.reads.total()
    for _ in loader:
        torch.rand(())
    assert data.reads.total() == reads + 6  # nothing is dropped any more
    loader.close()


def test_two_iterators_at_once_are_two_passes() -> None:
    loader = prefetch(DataLoader(Numbers(6), batch_size=2), Prefetch(threads=True, workers=1))
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.close()


def test_as_many_threads_as_reading_takes_of_computing_and_no_more_than_cores() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.004)
            return index

    for data, seconds, count in ((Numbers(6), 0.004, "1 thread,"), (Slow(6), 0.0, "3 threads,")):
        loader = prefetch(DataLoader(data, batch_size=1), Prefetch(threads=True), cores=3)
        for _ in loader:
            time.sleep(seconds)
        [row] = loader.report_rows()
        assert row.value.startswith(count)
        loader.close()


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("a bad sample")
        return index


@pytest.mark.process
@pytest.mark.parametrize("config", [{"workers": 2}, {"workers": 2, "threads": True}, {}])
def test_an_error_names_the_sample_and_the_next_pass_begins_anew(config: Config) -> None:
    loader = prefetch(DataLoader(Broken(8), batch_size=2), Prefetch(**config))
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad sample") as caught:
            list(loader)
        said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        assert "while sample 5 of the dataset was read" in said
    loader.close()


class Dying(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Hanging(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.go_on = threading.Event()

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.go_on.wait(30)
        return index


@pytest.mark.process
def test_a_worker_that_dies_is_an_error_that_names_the_samples() -> None:
    loader = prefetch(DataLoader(Dying(8), batch_size=2), Prefetch(workers=1))
    with pytest.raises(DataError, match=r"killed by signal.* while samples \d, \d were awaited"):
        list(loader)
    loader.close()


def test_a_thread_that_hangs_is_an_error_that_names_the_samples() -> None:
    data = Hanging(8)
    config = Prefetch(workers=1, threads=True, timeout=0.2)
    loader = prefetch(DataLoader(data, batch_size=2), config)
    with pytest.raises(DataError, match=r"samples 4, 5 were not read within 0.2 s"):
        list(loader)
    data.go_on.set()
    loader.close()


class Sleeping(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            time.sleep(30)
        return index


@pytest.mark.process
def test_a_worker_that_hangs_is_an_error_that_names_the_samples() -> None:
    loader = prefetch(DataLoader(Sleeping(8), batch_size=2), Prefetch(workers=1, timeout=1.0))
    with pytest.raises(DataError, match=r"timed out after 1.* samples 4, 5 were awaited"):
        list(loader)
    loader.close()


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


class Stateful(DataLoader[int]):
    """A loader with a state, as torchdata's: how many batches it has read."""

    read = start = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        self.read = first
        for batch in islice(super().__iter__(), first, None):
            self.read += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["read"]


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


@pytest.mark.process
def test_an_error_in_a_stream_is_raised_and_the_next_pass_begins_anew() -> None:
    loader = prefetch(DataLoader(Stream(8, fails_at=5)))
    for _ in range(2):
        seen: list[int] = []
        with pytest.raises(ValueError, match="a bad sample"):
            seen.extend(int(batch) for batch in loader)
        assert seen == [0, 1, 2, 3, 4]
    loader.close()


@pytest.mark.process
def test_the_state_of_a_loader_is_that_after_the_batch_which_was_given_out() -> None:
    loader = prefetch(Stateful(Numbers(10), batch_size=1, num_workers=1), Prefetch(depth=4))
    for batch in loader:
        if int(batch) == 3:
            break
    state = loader.state_dict()
    loader.close()
    assert state == {"read": 4}
    resumed = prefetch(Stateful(Numbers(10), batch_size=1, num_workers=1))
    resumed.load_state_dict(state)
    assert [int(batch) for batch in resumed] == [4, 5, 6, 7, 8, 9]
    assert [int(batch) for batch in resumed] == [*range(10)]
    first = iter(resumed)
    next(first)
    with pytest.raises(UsageError, match="a second iterator"):
        iter(resumed)
    resumed.close()


@pytest.mark.parametrize(
    ("loader", "says"),
    {
        "a list": ([1, 2], "the loader is a list: give a DataLoader"),
        "a state": (Stateful(Numbers(3)), "give it num_workers of 1 or more"),
    }.values(),
)
def test_what_cannot_be_read_ahead_is_refused(loader: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        prefetch(loader)


def test_attributes_are_those_of_the_loader() -> None:
    inner = DataLoader(Numbers(5), batch_size=2)
    loader = prefetch(inner)
    assert len(loader) == 3
    assert loader.dataset is inner.dataset
    assert loader.batch_size == 2


def test_single_samples_and_datasets_that_read_whole_batches() -> None:
    class Whole(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

    config = Prefetch(threads=True, workers=1)
    for data, how, expected in (
        (Numbers(3), {"batch_size": None}, [0, 1, 2]),
        (Whole(3), {"batch_size": 2}, [[0, 10], [20]]),
    ):
        loader = prefetch(DataLoader(data, **how), config)
        assert [getattr(b, "tolist", lambda b=b: b)() for b in loader] == expected
        loader.close()


def test_threads_end_with_close_and_a_later_pass_starts_them_again() -> None:
    loader = prefetch(DataLoader(Numbers(4)), Prefetch(threads=True, workers=2))
    before = threading.active_count()
    for _ in range(2):
        assert len(list(loader)) == 4
        assert threading.active_count() == before + 2
        loader.close()
        loader.close()
        deadline = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert threading.active_count() == before
    gc.collect()


def test_a_session_reads_ahead_and_says_so(tmp_path: Path) -> None:
    def losses(strategy: dict[str, Any]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(10, 1))
        loader = DataLoader(data, batch_size=3, shuffle=True, generator=generator())
        found = []
        with slipstream.accelerate(model, optimizer, loader, strategy=strategy) as session:
            for _ in range(3):
                for (batch,) in session.loader:
                    loss = session.model(batch).square().mean()
                    session.backward(loss)
                    session.step()
                    found.append(loss.item())
            said = session.report()
        assert ("1 thread, 5 batches ahead" in said) == ("data" in strategy)
        return found

    trace = {"steps": 2, "folder": str(tmp_path)}
    ahead = losses({"data": {"prefetch": {"threads": True, "workers": 1, "depth": 5}}})
    assert ahead == losses({"trace": trace})
    assert read(tmp_path / "trace.json").meta["prefetchable"]
