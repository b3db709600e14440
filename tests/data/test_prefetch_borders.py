"""Prefetch from one pass to the next: what was left behind does not reach the next one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from multiprocessing import active_children
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slipstream.data.balance import BalancedBatches
from slipstream.data.prefetch import device_copy, prefetch
from slipstream.errors import DataError
from slipstream.strategy import PrefetchConfig
from tests.data.datasets import Numbers, Stream, generator

IN_THREADS = PrefetchConfig(threads=True, workers=1, depth=7)


def subset() -> tuple[Sampler[int], Callable[[int], None]]:
    """A sampler, and what a training does with it before an epoch."""
    sampler = SubsetRandomSampler([0, 1, 2], generator())

    def change(epoch: int) -> None:
        sampler.indices[:] = [3 * epoch + place for place in range(3)]  # type: ignore[index]

    return sampler, change


def weighted_by_array() -> tuple[Sampler[int], Callable[[int], None]]:
    weights = np.eye(12)[0]
    sampler = WeightedRandomSampler(weights, 3, generator=generator())  # type: ignore[arg-type]

    def change(epoch: int) -> None:
        weights[:] = np.eye(12)[epoch]

    return sampler, change


def weighted() -> tuple[Sampler[int], Callable[[int], None]]:
    sampler = WeightedRandomSampler([1.0] * 12, 3, generator=generator())

    def change(epoch: int) -> None:
        sampler.weights = torch.eye(12)[epoch]

    return sampler, change


@pytest.mark.parametrize("made", [subset, weighted, weighted_by_array])
def test_what_is_set_on_a_sampler_between_epochs_counts(
    made: Callable[[], tuple[Sampler[int], Callable[[int], None]]],
) -> None:
    def epochs(wrapped: Callable[[Any], Any]) -> list[Any]:
        sampler, change = made()
        loader = wrapped(DataLoader(Numbers(12), sampler=sampler))
        seen = []
        for epoch in range(4):
            change(epoch)
            seen.append([int(batch) for batch in loader])
        return seen

    assert epochs(lambda loader: prefetch(loader, IN_THREADS)) == epochs(lambda loader: loader)


def test_loops_that_count_their_batches_see_the_same_order() -> None:
    def epochs(wrapped: Callable[[Any], Any]) -> list[Any]:
        how: dict[str, Any] = {"batch_size": 2, "shuffle": True, "generator": generator()}
        loader, seen = wrapped(DataLoader(Numbers(7), **how)), []
        for _ in range(5):
            batches = iter(loader)  # the one before has given all, and was not asked for more
            seen += [next(batches).tolist() for _ in range(len(loader))]
        return [*seen, how["generator"].get_state().tolist()]

    assert epochs(lambda loader: prefetch(loader, IN_THREADS)) == epochs(lambda loader: loader)


def test_an_iterator_that_has_given_all_takes_nothing_of_the_next_pass() -> None:
    data = Numbers(8)
    loader = prefetch(DataLoader(data), IN_THREADS)
    old = iter(loader)
    assert len([*islice(old, 8)]) == 8
    new = iter(loader)
    assert next(old, None) is None
    assert [int(batch) for batch in new] == [*range(8)]
    assert data.reads.total() <= 3 * 8
    loader.close()


class Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise LookupError("no more indices")

    def __len__(self) -> int:
        return 8


@pytest.mark.process
@pytest.mark.parametrize(
    "config", [IN_THREADS, PrefetchConfig(workers=1)], ids=["threads", "workers"]
)
@pytest.mark.parametrize("left", [None, 1])
def test_an_error_of_a_sampler_comes_where_its_batch_would(
    config: PrefetchConfig, left: int | None
) -> None:
    loader = prefetch(DataLoader(Numbers(8), sampler=Failing()), config)
    if left is not None:
        assert len([*islice(loader, left)]) == left
    seen = []
    with pytest.raises(LookupError, match="no more indices"):
        seen.extend(int(batch) for batch in loader)
    assert seen == [0, 1, 2, 3, 4]
    loader.close()


def test_what_batches_are_dealt_says_of_itself_stays_that_of_the_training() -> None:
    def told(wrapped: Callable[[Any], Any]) -> list[Any]:
        lengths = [1 + number % 5 for number in range(40)]
        batches = BalancedBatches(lengths, rank=0, ranks=2, batch_size=6)
        batches.load_state_dict({"epoch": 0, "seed": 0, "samples": 12})
        loader, seen = wrapped(DataLoader(Numbers(40), batch_sampler=batches)), []
        for epoch in range(3):
            if epoch:
                batches.set_epoch(epoch)
            for step, batch in enumerate(loader):
                weight = batches.weight(step, per="tokens")
                seen.append((batch.tolist(), weight, batches.state_dict(step + 1)))
        return seen

    assert told(lambda loader: prefetch(loader, IN_THREADS)) == told(lambda loader: loader)


def test_a_pass_before_the_epochs_are_set_spoils_no_more_than_a_guess_or_two() -> None:
    data = Numbers(8)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = prefetch(
        DataLoader(data, sampler=sampler), PrefetchConfig(threads=True, workers=1, depth=2)
    )
    assert len([*loader]) == 8  # statistics, say
    for epoch in range(10):
        sampler.set_epoch(epoch)
        assert len([*loader]) == 8
    assert data.reads.total() <= 11 * 8 + 3 * 2
    loader.close()


class Draws(Numbers):
    """Its samples are random; a training tells it its epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Workers start anew."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, ()))


class DrawsInStream(Stream):
    def set_epoch(self, epoch: int) -> None:
        """Workers start anew."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1 << 30, ())) for _ in super().__iter__())


@pytest.mark.process
@pytest.mark.parametrize("data", [Draws(3), DrawsInStream(3)], ids=["samples", "stream"])
def test_workers_that_start_anew_draw_other_numbers(data: Dataset[int]) -> None:
    def drawn() -> list[tuple[int, ...]]:
        torch.manual_seed(0)
        loader = prefetch(DataLoader(data, num_workers=1))
        epochs = [tuple(int(batch) for batch in loader) for _ in range(3)]
        loader.close()
        return epochs

    assert len({*drawn()}) == 3
    assert drawn() == drawn()


@pytest.mark.process
@pytest.mark.usefixtures("no_plain_loader")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_do_not_answer_between_epochs_are_exchanged(sent: signal.Signals) -> None:
    loader = prefetch(DataLoader(Numbers(6), shuffle=True, num_workers=1))

    def epoch() -> list[int]:
        """It draws, as dropout does, so that workers stop at its end."""
        return sorted(int(batch) + 0 * int(torch.rand(())) for batch in loader)

    assert [epoch() for _ in range(3)] == [[*range(6)]] * 3
    [worker] = active_children()
    assert worker.pid is not None
    os.kill(worker.pid, sent)
    goes_on = threading.Timer(2.0, os.kill, (worker.pid, signal.SIGCONT))
    if sent == signal.SIGSTOP:
        goes_on.start()
    assert epoch() == [*range(6)]
    assert [child.pid for child in active_children()] != [worker.pid]
    loader.close()
    assert not active_children()


class Bad(Numbers):
    """Sample 2 cannot be read."""

    def __init__(self, size: int, error: Exception | None) -> None:
        super().__init__(size)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 2 and self.error is None:
            time.sleep(0.5)  # those before it are sent
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2 and self.error is not None:
            raise self.error
        return index


@pytest.mark.process
@pytest.mark.usefixtures("no_plain_loader")
@pytest.mark.parametrize(
    "error", [None, DataError("the cache is full"), ValueError("bad")], ids=str
)
def test_what_happens_to_a_batch_that_nobody_asks_for_is_not_raised(
    error: Exception | None,
) -> None:
    loader = prefetch(DataLoader(Bad(6, error)), PrefetchConfig(workers=1))
    for _ in range(3):
        assert [int(batch) for batch in islice(loader, 1)] == [0]
    with pytest.raises(DataError if error is None else type(error)):
        list(loader)
    loader.close()
    assert not active_children()


@pytest.mark.process
@pytest.mark.parametrize("threads", [True, False])
def test_an_error_of_any_class_stays_what_it_is(threads: bool) -> None:
    data = Bad(3, URLError("no route"))
    loader = prefetch(DataLoader(data), PrefetchConfig(workers=1, threads=threads))
    with pytest.raises(URLError, match="no route"):
        list(loader)
    loader.close()
    assert not active_children()


class Handle(Numbers):
    """Opens its file when it is first read from."""

    opened_by: int | None = None

    def __getitem__(self, index: int) -> int:
        if self.opened_by is None:
            self.opened_by = os.getpid()
        return int(self.opened_by == os.getpid())


@pytest.mark.process
@pytest.mark.parametrize(
    "wrapped",
    [lambda data: data, lambda data: Subset(data, range(12)), lambda data: ConcatDataset([data])],
    ids=["alone", "a part", "joined"],
)
def test_workers_do_not_get_what_this_process_has_opened(wrapped: Callable[[Any], Any]) -> None:
    loader = prefetch(DataLoader(wrapped(Handle(12))), cores=1)
    for _ in range(2):
        assert all(int(batch) for batch in loader)
    assert loader.report_rows()[0].value.startswith("1 worker")
    loader.close()


@pytest.mark.process
def test_a_pass_over_a_stream_that_is_never_begun_leaves_nothing() -> None:
    loader = prefetch(DataLoader(Stream(8)))
    batches = iter(loader)
    loader.close()
    assert not active_children()
    del batches


@pytest.mark.process
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_may_be_started_otherwise(context: str) -> None:
    data = Numbers(6)
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": context}
    loader = prefetch(DataLoader(data, batch_size=None, **how))
    for _ in range(2):
        assert [*loader] == [*range(6)]
    loader.close()
    assert not active_children()


def test_an_error_comes_after_the_batch_that_was_copied_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: the streams do nothing, and copies stay here."""

    def batches() -> Iterator[torch.Tensor]:
        yield from torch.arange(3)
        raise ValueError("a bad sample")

    stream = SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(device_copy, "_arrived", lambda copy, device: copy.batch)
    seen: list[int] = []
    with pytest.raises(ValueError, match="a bad sample"):
        seen.extend(int(b) for b in device_copy.copied_ahead(batches(), torch.device("cpu")))
    assert seen == [0, 1, 2]
