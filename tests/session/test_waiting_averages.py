"""Averages that wait for ``step()`` while other passes run, fail, or are zeroed.

Each is compared with one process on the batches of all ranks, or refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import slipstream
from slipstream.errors import UsageError
from tests.harness.ranks import Ranks
from tests.session.test_habits import assert_equal, batches, loss_of, model_of, opened, plain

TRANSPORTS = ["flat", "sharded"]


def broken(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss whose backward raises once the last layer has its gradients."""
    first, tanh, last = model.children()
    hidden = tanh(first(batch))
    hidden.register_hook(_refuse)
    loss: torch.Tensor = last(hidden).square().mean()
    return loss


def _refuse(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def in_one_process(failing: tuple[int, ...], updates: int) -> list[torch.Tensor]:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = batches(2 * updates)
    for update in range(updates):
        for rank in range(2):
            (loss_of(model, data[2 * update, rank]) / 2).backward()
            second = broken if rank in failing else loss_of
            with contextlib.suppress(ZeroDivisionError):
                (second(model, data[2 * update + 1, rank]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def failed_in_no_sync(transport: str, verb: str, failing: tuple[int, ...]) -> None:
    rank, (model, _, session) = dist.get_rank(), opened({"transport": transport})
    with session:
        for first, second in batches(4).unflatten(0, (2, 2)):
            session.backward(loss_of(model, first[rank]))
            with session.no_sync(), contextlib.suppress(ZeroDivisionError):
                session.backward((broken if rank in failing else loss_of)(model, second[rank]))
            assert getattr(session, verb)()
    assert_equal(model, in_one_process(failing, 2))


@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("verb", ["step", "flush"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_pass_that_fails_in_no_sync_is_averaged(
    two: Ranks, transport: str, verb: str, failing: tuple[int, ...]
) -> None:
    two.run(failed_in_no_sync, transport, verb, failing)


def both(loss: Callable[..., torch.Tensor], model: nn.Module, pair: torch.Tensor) -> torch.Tensor:
    return (loss(model, pair[0]) + loss(model, pair[1])) / 2


def test_a_second_pass_that_fails_keeps_no_loss_scale_on_one_process() -> None:
    model, _, session = opened({})
    with session:
        for first, second in batches(4).unflatten(0, (2, 2)):
            session.backward(1024 * both(loss_of, model, first), loss_scale=1024.0)
            with pytest.raises(ZeroDivisionError):
                session.backward(1024 * broken(model, second.flatten(0, 1)), loss_scale=1024.0)
            assert session.step()
    assert_equal(model, in_one_process((0, 1), 2))


def thrown_away_on_one_rank() -> int:
    rank, (model, optimizer, session) = dist.get_rank(), opened({})
    bad, one, two = (batch[rank] for batch in batches(3))
    with session:
        if rank == 0:
            with session.no_sync():
                session.backward(loss_of(model, bad))
            optimizer.zero_grad()
        with session.no_sync():
            session.backward(loss_of(model, one))
        session.backward(loss_of(model, two))
        session.step()
        return session.skipped


def test_sums_that_one_rank_throws_away_in_no_sync_are_no_skipped_update(two: Ranks) -> None:
    assert two.run(thrown_away_on_one_rank) == [0, 0]


def left_out_and_zeroed_inside(gradients: dict[str, Any], skips: bool) -> list[torch.Tensor]:
    rank, (model, optimizer, session) = dist.get_rank(), opened(gradients)
    left_out, one, two = (batch[rank] for batch in batches(3))
    with session:
        if skips:
            session.backward(loss_of(model, left_out))
        with session.no_sync():
            optimizer.zero_grad()
            session.backward(loss_of(model, one))
        session.backward(loss_of(model, two))
        assert session.step()
        assert (session.updates, session.skipped) == (1, skips)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_skipped_update_may_be_zeroed_in_no_sync(two: Ranks, codec: str | None) -> None:
    """As by Lightning, whose loss scaler skips an update before a window of several passes."""
    skipped, never = (
        two.run(left_out_and_zeroed_inside, {"codec": codec}, s) for s in (True, False)
    )
    for ours, others in zip(skipped, never, strict=True):
        assert all(map(torch.equal, ours, others))


def plain_backward_in_no_sync(zeroed: str) -> None:
    rank, (model, optimizer, session) = dist.get_rank(), opened({})
    one, two, three = (batch[rank] for batch in batches(3))
    with session:
        session.backward(loss_of(model, one))
        if zeroed == "too late":
            with session.no_sync():
                loss_of(model, two).backward()
            with pytest.raises(UsageError, match=r"on top of an average"):
                session.step()
            with pytest.raises(UsageError, match=r"on top of an average"):
                session.backward(loss_of(model, three))
        optimizer.zero_grad()
        with session.no_sync():
            loss_of(model, two).backward()
        session.backward(loss_of(model, three))
        session.step()
        assert session.skipped == 1
    for mine, theirs in zip(model.parameters(), plain([[1, 2]]), strict=True):
        before = dict(zip(model.parameters(), model_of().parameters(), strict=True))[mine]
        moved = 2 * (theirs - before)  # that is the mean of two batches, this their sum
        torch.testing.assert_close(mine.detach(), (before + moved).detach())


@pytest.mark.parametrize("zeroed", ["before", "too late"])
def test_a_plain_backward_adds_to_no_average(two: Ranks, zeroed: str) -> None:
    two.run(plain_backward_in_no_sync, zeroed)


def zero_by_itself(strategy: dict[str, Any]) -> tuple[int, int]:
    """The first loss of a batch has gradients that are exactly 0, on the last rank."""
    rank = dist.get_rank() if dist.is_initialized() else 1
    model, _, session = opened({}, **strategy)
    with session:
        for batch in batches(3):
            session.backward(loss_of(model, batch[rank]) * (1 - rank))
            session.backward(loss_of(model, batch[rank]))
            session.step()
        return session.common_updates, session.skipped


def test_gradients_that_are_zero_by_themselves_end_no_update() -> None:
    assert zero_by_itself({}) == (3, 0)


def test_ranks_that_meet_count_alike_where_one_has_gradients_of_zero(two: Ranks) -> None:
    assert two.run(zero_by_itself, {"local": {"steps": 2}}) == [(3, 0)] * 2


def zeroed_in_no_sync(transport: str, to_none: bool) -> None:
    rank, (model, optimizer, session) = dist.get_rank(), opened({"transport": transport})
    one, two, three = (batch[rank] for batch in batches(3))
    with session:
        session.backward(loss_of(model, one))
        with session.no_sync():
            session.backward(loss_of(model, two))
            optimizer.zero_grad(set_to_none=to_none)
            session.backward(loss_of(model, three))
        session.step()
    assert_equal(model, plain([[2]]))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_zeroing_takes_averages_with_it(two: Ranks, transport: str, to_none: bool) -> None:
    two.run(zeroed_in_no_sync, transport, to_none)


def several_losses_of_another(codec: str | None) -> tuple[int, int, str]:
    """Two passes of an update give gradients to the layer of another optimizer alone, as the losses
    of two discriminators do."""
    scale, rank, words = 1024.0, dist.get_rank(), ""
    model, plainly = model_of(), model_of()
    mine, other = (SGD(model.get_submodule(name).parameters(), lr=0.1) for name in "20")
    layer, expected = model.get_submodule("0"), plainly.get_submodule("0")
    reference = SGD(plainly.parameters(), lr=0.1)
    with slipstream.accelerate(model, mine, None, {"gradients": {"codec": codec}}) as session:
        for batch in batches():
            for factor in (1.0, 2.0):
                loss = factor * layer(batch[rank]).square().mean()
                try:
                    session.backward(scale * loss, loss_scale=scale)
                except UsageError as error:
                    words = str(error)
            other.step()
            other.zero_grad()
            (3 * expected(batch).square().mean()).backward()
            reference.step()
            reference.zero_grad()
        assert session.between_updates
        counts = session.updates, session.skipped
    if codec is None:
        assert_equal(model, [p.detach() for p in plainly.parameters()])
    return *counts, words


def test_several_losses_of_another_optimizer_alone_are_one_update(two: Ranks) -> None:
    for updates, skipped, words in two.run(several_losses_of_another, None):
        assert (updates, skipped, words) == (4, 0, "")
    for _, skipped, words in two.run(several_losses_of_another, "int8"):
        assert skipped == 0
        assert "backward() was called twice before step()" in words


def step_of_another_left_out() -> tuple[int, int]:
    """A scaler of its own has skipped the step of another optimizer, which zeroes later."""
    rank, model, plainly = dist.get_rank(), model_of(), model_of()
    mine, other = (SGD(model.get_submodule(name).parameters(), lr=0.1) for name in "20")
    reference = SGD(plainly.get_submodule("2").parameters(), lr=0.1)
    layer, last, expected = (
        m.get_submodule(n) for m, n in [(model, "0"), (model, "2"), (plainly, "2")]
    )
    with slipstream.accelerate(model, mine) as session:
        for batch in batches():
            other.zero_grad()
            session.backward(2048 * layer(batch[rank]).square().mean(), loss_scale=2048.0)
            hidden = layer(batch).tanh().detach()
            session.backward(1024 * last(hidden[rank]).square().mean(), loss_scale=1024.0)
            session.step()
            expected(hidden).square().mean().backward()
            reference.step()
            reference.zero_grad()
        counts = session.updates, session.skipped
    assert_equal(model, [p.detach() for p in plainly.parameters()])
    return counts


def test_a_step_of_another_optimizer_may_be_left_out(two: Ranks) -> None:
    assert two.run(step_of_another_left_out) == [(4, 4)] * 2


def flag_left_in(how: str) -> list[str]:
    """As nanoGPT and llm.c: the flag is one of DistributedDataParallel's wrapper."""
    gradients = {"accumulate": 2} if how == "window" else {}
    rank, (model, _, session) = dist.get_rank(), opened(gradients)
    with session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for pair in batches(4).unflatten(0, (2, 2)):
            for micro in range(2):
                model.require_backward_grad_sync = micro == 1
                gathers = how == "no_sync" and micro == 0
                with session.no_sync() if gathers else contextlib.nullcontext():
                    part = 1 if how == "window" else 2
                    session.backward(loss_of(model, pair[micro][rank]) / part)
                if how == "window":
                    session.step()
            if how != "window":
                session.step()
    assert_equal(model, plain([[0, 1], [2, 3]]))
    assert all(x.filename == __file__ for x in caught)
    return [str(x.message) for x in caught]


def test_a_flag_that_only_ddp_obeys_is_a_warning_where_it_changes_something(two: Ranks) -> None:
    for (said,) in two.run(flag_left_in, "left in"):
        assert "only DistributedDataParallel obeys" in said
        assert "session.no_sync()" in said
    for how in ("no_sync", "window"):
        assert two.run(flag_left_in, how) == [[], []]
