"""A loss is weighed by its own batch: batches that are read ahead of ``backward()`` are refused."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from slipstream.data.balance import SampleBalance
from slipstream.errors import UsageError
from slipstream.strategy import BalanceConfig


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
