"""Prefetch: workers stay and read across the borders of epochs; what it says of itself."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import slipstream
from slipstream.data.prefetch import PrefetchLoader, map_reader, prefetch
from slipstream.data.prefetch.map_reader import MEASURED, SEEN, _Timing
from slipstream.errors import UsageError
from slipstream.strategy import PrefetchConfig
from slipstream.trace import read
from tests.data.datasets import Numbers, Stream, Waits, generator


def pids(loader: PrefetchLoader) -> set[int]:
    return {int(batch[0]) for batch in loader}


class Pids(Numbers):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.process
def test_workers_live_on_from_epoch_to_epoch() -> None:
    loader = prefetch(DataLoader(Pids(8), batch_size=2), PrefetchConfig(workers=2))
    try:
        first, second = pids(loader), pids(loader)
        assert first == second
        assert len(first) == 2
        assert os.getpid() not in first
    finally:
        loader.close()


def test_the_next_epoch_is_read_before_this_one_ends() -> None:
    data = Numbers(8)
    loader = prefetch(
        DataLoader(data, batch_size=2), PrefetchConfig(threads=True, workers=1, depth=3)
    )
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    deadline = time.monotonic() + 60
    while data.reads.total() < 8 + 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert data.reads == Counter([*range(8), *range(6)])
    assert next(iter(loader)).tolist() == [0, 1]
    loader.close()


def test_nothing_is_read_twice_or_lost() -> None:
    data = Numbers(10)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loading = DataLoader(data, batch_size=3, sampler=sampler)
    loader = prefetch(loading, PrefetchConfig(threads=True, workers=1, depth=2))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 4
    loader.close()
    assert all(4 <= count <= 5 for count in data.reads.values())  # a fifth epoch was begun
    assert sum(data.reads.values()) <= 4 * 10 + 2 * 3


def test_what_the_training_draws_from_makes_the_next_order_unknown_and_the_report_says_so() -> None:
    data = Numbers(6)
    loader = prefetch(
        DataLoader(data, batch_size=2, shuffle=True), PrefetchConfig(threads=True, workers=1)
    )
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


def test_as_many_threads_as_reading_takes_of_computing_and_no_more_than_cores() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.004)
            return index

    for data, seconds, count in ((Numbers(12), 0.05, "1 thread,"), (Slow(12), 0.0, "3 threads,")):
        loader = prefetch(DataLoader(data, batch_size=1), PrefetchConfig(threads=True), cores=3)
        for _ in loader:
            time.sleep(seconds)
        [row] = loader.report_rows()
        assert row.value.startswith(count)
        loader.close()


@pytest.mark.process
@pytest.mark.parametrize("dataset", [Numbers(10), Stream(10)], ids=["samples", "stream"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_of_a_loader_is_that_after_the_batch_which_was_given_out(
    dataset: Any, persistent: bool
) -> None:
    def loader() -> StatefulDataLoader[int]:
        return StatefulDataLoader(
            dataset, batch_size=1, num_workers=1, persistent_workers=persistent
        )

    def left_at_3(loader: Any) -> Any:
        torch.manual_seed(0)  # of which the state holds a draw
        for batch in loader:
            if int(batch) == 3:
                return loader.state_dict()
        return None

    ahead, plain = prefetch(loader(), PrefetchConfig(depth=4)), loader()
    state = left_at_3(ahead)
    assert state == left_at_3(plain)
    ahead.close()
    resumed = prefetch(loader())
    resumed.load_state_dict(state)
    assert [int(batch) for batch in resumed] == [4, 5, 6, 7, 8, 9]
    assert [int(batch) for batch in resumed] == [*range(10)]
    first = iter(resumed)
    next(first)
    with pytest.raises(UsageError, match="a second iterator"):
        iter(resumed)
    resumed.close()


def test_attributes_are_those_of_the_loader() -> None:
    inner = DataLoader(Numbers(5), batch_size=2)
    loader = prefetch(inner)
    assert len(loader) == 3
    assert loader.dataset is inner.dataset
    assert loader.batch_size == 2


def test_reading_goes_on_where_a_loop_counts_its_batches() -> None:
    data = Numbers(8)
    loader = prefetch(
        DataLoader(data, batch_size=2), PrefetchConfig(threads=True, workers=1, depth=2)
    )
    for _ in range(3):
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(len(loader))][-1] == [6, 7]
    assert data.reads.total() <= 3 * 8 + 4  # nothing was dropped
    loader.close()


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

    waits = [e.args for e in read(tmp_path / "trace.json").events if e.name == "data_wait"]
    assert waits == [{"readers": 0}] * 2
    losses({"trace": trace, "data": {"prefetch": {"threads": True, "workers": 1, "depth": 5}}})
    waits = [e.args for e in read(tmp_path / "trace.json").events if e.name == "data_wait"]
    assert [wait["readers"] for wait in waits] == [1] * 2
    assert all(0 <= wait["queued"] <= 5 for wait in waits)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["threads", "workers", "stream"])
def test_the_queue_is_counted(kind: str) -> None:
    config = PrefetchConfig(threads=kind == "threads", workers=2, depth=4)
    loading = DataLoader(Numbers(40), batch_size=2)
    if kind == "stream":
        loading = DataLoader(Stream(40), batch_size=2, num_workers=2)
    loader = prefetch(loading, config)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        deadline = time.monotonic() + 60
        while loader.reading()["queued"] < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert loader.reading() == {"readers": 2, "queued": 4}
    assert len([*batches]) == 17
    loader.close()


class Kinds(Numbers):
    """Samples of everything that a batch may be made of; the last batch is large."""

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(3.0) + index
        return {
            "types": tuple(row.to(kind) for kind in (torch.bfloat16, torch.bool, torch.complex64)),
            "turned": torch.arange(6).view(2, 3).t(),
            "empty": torch.empty(0, 2),
            "words": ["a", str(index)],
            "large": torch.full((300_000 if index >= 4 else 3,), float(index)),
        }


@pytest.mark.process
@pytest.mark.parametrize("streams", [True, False])
def test_batches_come_as_they_are_the_small_ones_without_shared_memory(streams: bool) -> None:
    class Several(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return map(Kinds(6).__getitem__, range(6))

    loading = DataLoader(Several() if streams else Kinds(6), batch_size=2)
    loader = prefetch(loading, PrefetchConfig(workers=1))
    for ours, plain in zip(loader, loading, strict=True):
        assert ours.pop("words") == plain.pop("words")
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
        assert ours["large"].is_shared() == (ours["large"].nbytes > 2**20)
        ours["large"].add_(1)  # it may be written to
    loader.close()


@pytest.mark.process
def test_another_order_in_memory_stays() -> None:
    def last(samples: list[int]) -> torch.Tensor:
        return torch.ones(len(samples), 3, 2, 2).to(memory_format=torch.channels_last)

    loader = prefetch(
        DataLoader(Numbers(4), batch_size=2, collate_fn=last), PrefetchConfig(workers=1)
    )
    assert [batch.stride() for batch in loader] == [(12, 1, 6, 3)] * 2
    loader.close()


@pytest.mark.process
@pytest.mark.parametrize("threads", [True, False])
def test_batches_behind_a_slow_one_are_not_there(threads: bool) -> None:
    data = Waits(8, at=2)
    loader = prefetch(
        DataLoader(data, batch_size=2), PrefetchConfig(threads=threads, workers=2, depth=4)
    )
    batches = iter(loader)
    next(batches)
    time.sleep(0.3)  # in which the third one is read
    assert loader.reading()["queued"] == 0
    data.goes_on.set()
    deadline = time.monotonic() + 60
    while loader.reading()["queued"] < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loader.reading()["queued"] >= 3
    assert [int(batch[0]) for batch in batches] == [2, 4, 6]
    loader.close()


class Told(Numbers):
    """Its samples change with the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        slow = threading.current_thread() is not threading.main_thread()
        time.sleep(0.02 * slow)
        return 100 * self.epoch + index


def test_each_epoch_of_a_dataset_is_read_whoever_reads() -> None:
    data = Told(24)
    loader = prefetch(DataLoader(data), PrefetchConfig(threads=True), cores=1)
    for epoch in range(4):  # measured, compared, read by this process
        data.set_epoch(epoch)
        assert [int(batch) for batch in loader] == [100 * epoch + index for index in range(24)]
    assert loader.report_rows()[0].value.startswith("this process")
    loader.close()


class Unsized(torch.utils.data.Sampler[int]):
    """Does not say how long it is."""

    def __iter__(self) -> Any:
        return iter(range(6))


def test_a_sampler_need_not_say_how_long_it_is() -> None:
    sampler: Any = Unsized()
    loading = DataLoader(Numbers(6), batch_size=4, sampler=sampler)
    loader = prefetch(loading, PrefetchConfig(threads=True, workers=1))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    loader.close()


class SlowInThreads(Numbers):
    """As if handing over took long."""

    def __getitem__(self, index: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return index


def test_this_process_reads_where_handing_over_takes_longer() -> None:
    loader = prefetch(DataLoader(SlowInThreads(24)), PrefetchConfig(threads=True), cores=1)
    for _ in range(3):
        assert [int(batch) for batch in loader] == [*range(24)]
    assert loader.report_rows()[0].value.startswith("this process")
    loader.close()


@pytest.mark.parametrize(
    ("wait", "step", "is_doubted", "are_slower"),
    [
        (0.9, 1.5, True, True),  # 2.4 from batch to batch, where reading here takes 2
        (0.9, 1.0, True, False),
        (0.9, 1.19, True, False),  # 4.5 % longer may be chance
        (0.1, 5.0, False, True),  # the training has become slower: no fault of who reads
    ],
)
def test_whole_steps_are_compared(
    wait: float, step: float, is_doubted: bool, are_slower: bool
) -> None:
    timing, now = _Timing(), 0.0

    def read_here(count: int) -> None:
        nonlocal now
        for _ in range(count):
            timing.read_here(now, now + 1, 8)
            now += 2

    read_here(MEASURED)
    for _ in range(SEEN + 1):
        assert not timing.doubts_workers or is_doubted
        timing.waited(now, now + wait)
        now += wait + step
    assert timing.doubts_workers == is_doubted
    timing.begin_anew()
    read_here(SEEN)
    assert timing.has_read(SEEN)
    assert timing.workers_are_slower == are_slower


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_what_reads_is_judged_once_and_in_the_course_of_an_epoch(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that nothing else on the machine moves: a thread takes 0.05 s for a batch."""
    now, waited = 0.0, _Timing.waited

    class Slow(Numbers):
        """Slow in threads, or everywhere: then they are kept."""

        def __getitem__(self, index: int) -> int:
            nonlocal now
            now += seconds * (threading.current_thread() is threading.main_thread())
            return index

    def waits(timing: _Timing, start: float, _: float) -> None:
        nonlocal now
        now += 0.03
        waited(timing, start, now)

    monkeypatch.setattr(map_reader, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(_Timing, "waited", waits)
    loader = prefetch(DataLoader(Slow(24)), PrefetchConfig(threads=True, depth=1), cores=1)
    read = []
    for _ in range(3):
        read.append([])
        for batch in loader:
            assert int(batch) == len(read[-1])
            read[-1].append(loader.reading()["readers"])
            now += 0.02  # of computing
            if len(read) == 3:
                break
    assert read[0] == [0] * MEASURED + [1] * (24 - MEASURED)
    assert read[1][:SEEN] == [0] * SEEN
    assert len({*read[1][SEEN:], *read[2]}) == 1
    assert read[2][0] == (1 if seconds else 0)
    loader.close()


def test_what_a_resumed_run_skips_is_not_measured() -> None:
    def opened() -> Any:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = {"data": {"prefetch": {"threads": True}}}
        return slipstream.accelerate(model, optimizer, DataLoader(Numbers(40)), strategy)

    with opened() as session:
        passed = iter(session.loader)
        assert [int(next(passed)) for _ in range(30)] == [*range(30)]
        saved = session.state_dict()
    with opened() as session:
        session.load_state_dict(saved)
        passed = iter(session.loader)
        assert int(next(passed)) == 30
        assert "measuring" in session.report()
        assert [*map(int, passed)] == [*range(31, 40)]


class Prepared(Numbers):
    """Its samples tell which worker was prepared to read them."""

    prepared = -1

    def __getitem__(self, index: int) -> int:
        return self.prepared


def prepare(worker: int) -> None:
    Prepared.prepared = worker


@pytest.mark.process
def test_a_loader_that_prepares_its_workers_keeps_them() -> None:
    loading = DataLoader(Prepared(4), num_workers=2, worker_init_fn=prepare)
    loader = prefetch(loading, PrefetchConfig())
    assert [int(batch) for batch in loader] == [0, 1, 0, 1]
    assert loader.report_rows()[0].value.startswith("2 workers,")
    loader.close()


@pytest.mark.parametrize(
    ("config", "free", "said"),
    [
        ({"depth": 1, "workers": 4}, 10**9, "1 thread, 1 batches ahead"),
        ({"depth": 6, "workers": 4}, 10**9, "4 threads, 6 batches ahead"),
        ({}, 10**9, "4 threads, 8 batches ahead"),
        ({}, 4 * 5 * 800, "4 threads, 5 batches ahead"),  # half of it, for two ranks
        ({}, 4 * 3 * 800, "3 threads, 3 batches ahead"),
        ({}, 800, "1 thread, 1 batches ahead"),
    ],
)
def test_what_is_read_ahead_fits_in_memory(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], free: int, said: str
) -> None:
    class Rows(Numbers):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return torch.zeros(100, dtype=torch.float64)

    monkeypatch.setattr(map_reader, "free_host_bytes", lambda: free)
    loader = prefetch(
        DataLoader(Rows(12)), PrefetchConfig(threads=True, **config), cores=4, sharers=2
    )
    assert len(list(loader)) == 12
    assert loader.report_rows()[0].value == said
    loader.close()
