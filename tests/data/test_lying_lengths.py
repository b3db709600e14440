"""A length is a hint: whatever a loader says or does, each batch that exists is trained on, over
the ranks that have one; or there is an error. No hang."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import slipstream
from slipstream.data.balance import BalancedBatches, SampleBalance
from slipstream.data.lengths import certain_length
from slipstream.data.prefetch import prefetch
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import DataError, HangError, MismatchError, UsageError
from slipstream.strategy import BalanceConfig, PrefetchConfig
from tests.data.test_balanced_loader import loader_of
from tests.data.uneven_training import (
    batches,
    loss_of,
    model_and_optimizer,
    reference,
    values_of,
)
from tests.harness.counters import collectives, count
from tests.harness.ranks import PerRank, Ranks


class Says:
    """A loader of the user's own that says another length than it has."""

    def __init__(self, rows: Sequence[Any], says: int) -> None:
        self.rows, self.says = rows, says

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class SaysStream(Says, IterableDataset[Any]):
    """Several workers deal it out."""


class SaysSampler(Says, Sampler[int]):
    pass


class SaysDataLoader(DataLoader[Any]):
    def __len__(self) -> int:
        return 3


class Rising(Dataset[Any]):
    """Rows, of which one cannot be read."""

    def __init__(self, rows: Sequence[Any], error: BaseException, at: int) -> None:
        self.rows, self.error, self.at = rows, error, at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise self.error
        return self.rows[index]


def single(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **settings)


LOADERS: dict[str, Callable[[Sequence[Any], int], Iterable[Any]]] = {
    "a stream": lambda rows, says: single(SaysStream(rows, says)),
    "a loader": Says,
    "a sampler": lambda rows, says: single(rows, sampler=SaysSampler(range(len(rows)), says)),
    "a class of DataLoader": lambda rows, says: SaysDataLoader(rows, batch_size=None),
}


def trained(make: str, length: int, says: int, accumulate: int = 1) -> list[float]:
    model, optimizer, scheduler = model_and_optimizer()
    loader = LOADERS[make](batches(dist.get_rank(), length), says)
    strategy = {"gradients": {"accumulate": accumulate}}
    with slipstream.accelerate(model, optimizer, loader, strategy) as session:
        for _ in range(2):
            for batch in session.loader:
                session.backward(loss_of(session.model, batch))
                if session.step():
                    scheduler.step()
    return values_of(model)


def check(runs: list[list[float]], lengths: tuple[int, int], accumulate: int = 1) -> None:
    first, second = runs
    assert first == second
    torch.testing.assert_close(first, reference(lengths, accumulate, 2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("lengths", [(3, 2), (3, 5)])
def test_equal_lengths_that_are_not_true(two: Ranks, make: str, lengths: tuple[int, int]) -> None:
    check(two.run(trained, make, PerRank(*lengths), 3), lengths)


@pytest.mark.parametrize(
    ("lengths", "says"), [((2, 3), (4, 3)), ((3, 5), (3, 4)), ((4, 4), (3, 2))]
)
def test_unequal_lengths_that_are_not_true(
    two: Ranks, lengths: tuple[int, int], says: tuple[int, int]
) -> None:
    runs = two.run(trained, "a stream", PerRank(*lengths), PerRank(*says), 2)
    check(runs, lengths, accumulate=2)


def counted(known: bool) -> list[int]:
    """Comparisons by step, of an epoch of four batches."""
    loader = UnevenInputLoader(
        [1, 2, 3, 4] if known else iter([1, 2, 3, 4]), group=dist.group.WORLD
    )
    by_step = []
    with collectives() as log:
        for _ in loader:
            by_step.append(count(log, "all_gather"))
            assert loader.active == 2
        return [*by_step, count(log, "all_gather")]


def test_ranks_that_know_their_lengths_do_not_ask_in_between(two: Ranks) -> None:
    assert two.run(counted, True)[0] == [1, 1, 1, 1, 2]
    assert two.run(counted, False)[0] == [1, 2, 3, 4, 5]


def test_which_lengths_are_certain() -> None:
    rows: list[int] = [1, 2, 3]
    assert certain_length(rows) == 3
    assert certain_length(DataLoader(rows, batch_size=2)) == 2
    assert certain_length(DataLoader(rows, batch_size=2, drop_last=True)) == 1
    assert certain_length(DataLoader(rows, batch_sampler=[[0], [1]])) == 2
    ahead = prefetch(DataLoader(rows), PrefetchConfig(threads=True, workers=1))
    assert certain_length(ahead) == 3
    ahead.close()
    stream = single(SaysStream([1, 2], 3))
    assert certain_length(prefetch(stream)) is None
    for make in LOADERS.values():
        assert certain_length(make([], 3)) is None


# Loops that are left, begun anew, or nested.


def loops(kind: str, length: int) -> list[int]:
    """What a rank gets."""
    loader = UnevenInputLoader(iter_of(length), group=dist.group.WORLD)
    if kind == "islice":
        return [*itertools.islice(loader, 2), *itertools.islice(loader, 2)]
    if kind == "zip":
        return [b for pair in zip(loader, loader, strict=True) for b in pair]
    if kind == "begun anew":
        first, second = iter(loader), iter(loader)
        return [next(first), next(second), next(first), *second, next(first)]
    assert kind == "broken off"
    for step, _ in enumerate(loader):
        if step == 1:
            break
    return [*loader]


def dealt(epochs: int) -> tuple[list[int], list[int]]:
    """Batches of epochs by tokens, each behind one that is left early; and how many there are."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inner, expected = loader_of(rank, ranks), []
    balance = SampleBalance(inner, BalanceConfig(max_tokens=60), rank=rank, ranks=ranks)
    loader = UnevenInputLoader(balance.over(balance.loader), group=dist.group.WORLD)
    seen: list[int] = []
    for epoch in range(epochs):
        next(iter(loader))
        balance.sampler.set_epoch(epoch)
        said = len(loader)
        seen.append(sum(1 for _ in loader))
        assert seen[-1] == said
        batches = balance.loader.batch_sampler
        assert isinstance(batches, BalancedBatches)
        expected.append(batches.num_batches((epoch, 0)))
    return seen, expected


def test_batches_dealt_by_tokens_may_be_fewer_than_those_of_a_pass_left_early(two: Ranks) -> None:
    for seen, expected in two.run(dealt, 6):
        assert seen == expected
        assert len(set(seen)) > 1, "the case is none"


def iter_of(length: int) -> Iterable[int]:
    """Its length is not certain, but it can be iterated several times."""
    return single(SaysStream(list(range(length)), 7))


LOOPS = {
    "islice": ([0, 1, 0, 1], [0, 0, 0, 0]),
    "zip": ([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0]),
    "begun anew": ([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0]),
    "broken off": ([0, 1, 2], [0, 0, 0]),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_in_step(two: Ranks, kind: str) -> None:
    assert two.run(loops, kind, PerRank(3, 1)) == list(LOOPS[kind])


def left_alone() -> None:
    loader = UnevenInputLoader(iter_of(5), group=dist.group.WORLD)
    for step, _ in enumerate(loader):
        if step == 2 and dist.get_rank() == 1:
            break
        assert loader.active == 2
    list(loader)


def test_a_loop_that_one_rank_leaves_alone_is_refused_on_both(two: Ranks) -> None:
    for error in two.fail(left_alone).values():
        assert type(error) is MismatchError
        text = "rank 0 asks session.loader for batch 3 of pass 1, rank 1 for batch 0 of pass 2"
        assert text in str(error)


def read_at_once(length: int) -> list[float]:
    model, optimizer, _ = model_and_optimizer()
    rows = batches(dist.get_rank(), length)
    with slipstream.accelerate(model, optimizer, rows) as session:
        for batch in list(session.loader):
            session.backward(loss_of(session.model, batch))
            session.step()
    return values_of(model)


def test_batches_that_are_read_ahead_of_backward_are_refused_where_ranks_are_uneven(
    two: Ranks,
) -> None:
    first, second = two.run(read_at_once, 2)
    assert first == second
    for error in two.fail(read_at_once, PerRank(3, 2)).values():
        assert type(error) is UsageError
        assert "3 batches were taken from session.loader" in str(error)


def after_a_break() -> list[tuple[int, bool]]:
    """As the window asks after the loop, for its last batch and for one of the user's own."""
    loader = UnevenInputLoader([1, 2][: 2 - dist.get_rank()], group=dist.group.WORLD)
    for step, _ in enumerate(loader):
        if step == 1:
            break
        assert loader.active == 2
    return [(loader.active, loader.dummy_batch) for _ in range(2)]


def test_a_batch_that_is_used_after_its_loop_counts_as_it_did(two: Ranks) -> None:
    assert two.run(after_a_break) == [[(1, False), (2, False)], [(1, True), (2, False)]]


# Two sessions.


def shared(length: int) -> list[tuple[int, bool]]:
    first = UnevenInputLoader(list(range(length)), group=dist.group.WORLD)
    second = UnevenInputLoader(first, group=dist.group.WORLD)
    return [(second.active, second.dummy_batch) for _ in second]


def test_a_second_session_follows_the_loader_of_the_first(two: Ranks) -> None:
    expected = [[(2, False), (1, False)], [(2, False), (1, True)]]
    assert two.run(shared, PerRank(2, 1)) == expected


# Errors of the loader.


def skipping(certain: bool, bad: int) -> list[float]:
    """Train on; rank 1 skips what cannot be read, if the loader goes on."""
    model, optimizer, scheduler = model_and_optimizer()
    dataset = Rising(batches(dist.get_rank(), 4), ValueError("corrupt"), at=bad)
    sampler = None if certain else SaysSampler(range(4), 4)
    with slipstream.accelerate(model, optimizer, single(dataset, sampler=sampler)) as session:
        for _ in range(2):
            remaining = iter(session.loader)
            while True:
                try:
                    batch = next(remaining)
                except StopIteration:
                    break
                except ValueError:
                    continue
                session.backward(loss_of(session.model, batch))
                session.step()
                scheduler.step()
    return values_of(model)


def test_a_batch_that_is_skipped_on_one_rank_leaves_one_less(two: Ranks) -> None:
    check(two.run(skipping, False, PerRank(-1, 3)), (4, 3))


def test_a_batch_that_is_lost_where_others_count_on_it_is_an_error(two: Ranks) -> None:
    with pytest.raises(Exception, match="DataError") as caught:
        two.run(skipping, True, PerRank(-1, 1))
    error = caught.value.errors[1]  # type: ignore[attr-defined]
    assert type(error) is DataError
    assert "has 4 batches, as its sampler says, and gave 3" in str(error)
    assert "ValueError('corrupt')" in str(error)
    other = caught.value.errors[0]  # type: ignore[attr-defined]
    assert type(other) is HangError
    assert "has ended with DataError" in str(other)


def interrupted() -> list[int]:
    """Ctrl-C while a batch is read, and again."""
    dataset = Rising([0, 1, 2], KeyboardInterrupt(), at=1)
    inner = single(dataset, sampler=SaysSampler(range(3), 3))
    loader = UnevenInputLoader(inner, group=dist.group.WORLD)
    remaining, seen = iter(loader), []
    seen.append(next(remaining))
    with pytest.raises(KeyboardInterrupt):
        next(remaining)
    return [*map(int, seen), *map(int, remaining)]


def test_an_iterator_goes_on_after_an_interrupt(two: Ranks) -> None:
    assert two.run(interrupted) == [[0, 2], [0, 2]]


def test_a_pass_that_has_ended_with_an_error_does_not_end_quietly() -> None:
    """A loader that is a generator inside ends with its first error."""
    dataset = Rising([0, 1, 2, 3], ValueError("corrupt"), at=1)
    ahead = prefetch(single(dataset), PrefetchConfig(threads=True, workers=1))
    remaining = iter(UnevenInputLoader(ahead, group=None))
    assert next(remaining) == 0
    with pytest.raises(ValueError, match="corrupt"):
        next(remaining)
    with pytest.raises(DataError, match=r"2 batches before its end; begin another pass"):
        next(remaining)
    ahead.close()
    plain = iter(UnevenInputLoader(single(dataset), group=None))
    assert next(plain) == 0
    with pytest.raises(ValueError, match="corrupt"):
        next(plain)
    assert list(plain) == [2, 3]


def taken_in_a_thread() -> str:
    """As by a reader ahead around the session's loader."""
    loader = UnevenInputLoader(DataLoader(SaysStream([0, 1, 2], 3)), group=dist.group.WORLD)
    taken = iter(loader)
    has_read, may_end = Event(), Event()

    def read() -> None:
        next(taken)
        has_read.set()
        may_end.wait(60)

    thread = Thread(target=read)
    thread.start()
    has_read.wait(60)
    with pytest.raises(UsageError) as caught:
        _ = loader.active
    may_end.set()
    thread.join()
    assert loader.active == 2  # nothing runs beside any more
    next(taken)
    assert loader.active == 2
    return str(caught.value)


def test_a_thread_that_reads_ahead_is_refused_where_ranks_agree_on_each_batch(two: Ranks) -> None:
    for text in two.run(taken_in_a_thread):
        assert "another thread takes batches from session.loader than calls backward()" in text


# The seam to the session.


def test_a_copy_of_the_sessions_loader_is_refused() -> None:
    loader = UnevenInputLoader([1], group=None)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="copy the loader that accelerate"):
            make(loader)
        with pytest.raises(UsageError, match=r"copy the loader that prefetch\(\) got"):
            make(prefetch(DataLoader([1])))
