"""A loss is weighed by its own batch: batches that are read ahead of ``backward()`` are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

import slipstream
from slipstream.data.balance import SampleBalance
from slipstream.errors import UsageError
from slipstream.strategy import BalanceConfig
from tests.harness.ranks import Ranks


class Texts(list[str]):
    lengths = (5, 1, 1, 3, 2, 2)


def balance_of() -> SampleBalance:
    loader = DataLoader(Texts("abcdef"), batch_size=2)  # type: ignore[arg-type]
    return SampleBalance(loader, BalanceConfig(), rank=0, ranks=1)


def test_each_batch_is_weighed_as_often_as_there_are_losses() -> None:
    balance = balance_of()
    for _ in range(2):
        for _ in balance.over(balance.loader):
            assert [balance.weight for _ in range(2)] == [1.0, 1.0]
    assert balance.weight == 1.0, "of a batch of the user's own"


def test_batches_that_were_read_ahead_are_refused() -> None:
    balance = balance_of()
    batches = iter(balance.over(balance.loader))
    next(batches)
    next(batches)
    with pytest.raises(UsageError, match=r"2 batches were taken .* set data.prefetch"):
        _ = balance.weight
    list(balance.over(balance.loader))
    with pytest.raises(UsageError, match="3 batches were taken"):
        _ = balance.weight
    for _ in balance.over(balance.loader):
        assert balance.weight == 1.0


def test_a_loop_in_which_a_state_was_restored_gives_no_batch_of_another_place() -> None:
    balance = balance_of()
    batches = iter(balance.over(balance.loader))
    next(batches)
    state = balance.state_dict()
    next(batches)
    balance.load_state_dict(state)
    with pytest.raises(UsageError, match="begin another loop over"):
        next(batches)
    weights = []
    for _ in balance.over(balance.loader):
        weights.append(balance.weight)
        if len(weights) == 2:
            balance.load_state_dict(state)  # behind the last batch: the loop ends by itself
    assert weights == [1.0, 1.0]
    assert len(list(balance.over(balance.loader))) == 2


def test_a_loop_in_which_another_was_begun_gives_no_batch_of_another_place() -> None:
    balance = balance_of()
    first = iter(balance.over(balance.loader))
    next(first)
    second = iter(balance.over(balance.loader))
    next(second)
    with pytest.raises(UsageError, match="or another loop begun"):
        next(first)
    assert balance.weight == 1.0


class Numbers(list[int]):
    lengths = tuple(1 + 3 * n % 7 for n in range(40))


def pair(saved: list[Any]) -> Iterator[tuple[list[int], list[float]]]:
    """Batches of two sessions on one loader, as of a GAN, and what each of them counts one for."""
    numbers, strategy = Numbers(range(40)), {"data": {"balance": {}}}
    sampler: Any = DistributedSampler(numbers, shuffle=False)
    loader = DataLoader(numbers, sampler=sampler, batch_size=4)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    with (
        slipstream.accelerate(models[0], SGD(models[0].parameters()), loader, strategy) as one,
        slipstream.accelerate(models[1], SGD(models[1].parameters()), one.loader) as other,
    ):
        if saved:
            one.restore(saved[0])
            other.restore(saved[1])
        for batch in other.loader:
            saved[:] = [copy.deepcopy(session.checkpoint()) for session in (one, other)]
            yield batch.tolist(), [session._loop.window.weight for session in (one, other)]


def interrupted() -> list[tuple[list[int], list[float]]]:
    saved: list[Any] = []
    begun = [*islice(pair(saved), 2)]
    return [*begun, *pair(saved)]


def test_two_sessions_on_one_loader_weigh_by_samples_and_go_on_together(two: Ranks) -> None:
    found = two.run(interrupted)
    assert sorted(n for one in found for batch, _ in one for n in batch) == [*range(40)]
    weights = [pair for one in found for _, pair in one]
    assert all(one == other for one, other in weights)
    assert any(one != 1.0 for one, _ in weights)
