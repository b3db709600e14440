"""A script that skips an update on one rank, as torch's GradScaler does, stays in step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW

import slipstream
from slipstream import comm
from slipstream.errors import ModelError
from tests.harness.models import Dealt
from tests.harness.ranks import Ranks
from tests.local.reference import flat
from tests.local.test_training import batch, build, loss_of


def skipping(at: int, steps: int) -> tuple[int, Tensor]:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": steps}})
    for update in range(1, 7):
        session.backward(loss_of(model, session.rank, update))
        if not (update == at and session.rank):
            optimizer.step()
        optimizer.zero_grad()
    skipped = session.skipped
    session.close()
    return skipped, flat(model.parameters())


@pytest.mark.parametrize("at", [2, 4, 6])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_ranks_meet_though_one_has_skipped_an_update(two: Ranks, at: int, steps: int) -> None:
    (none, first), (one, second) = two.run(skipping, at, steps)
    assert (none, one) == (0, int(at < 6))  # the last shows when the session closes
    assert torch.equal(first, second)


def test_an_update_skipped_at_a_meeting_may_show_in_inference_mode() -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}}) as session:
        for update in range(6):
            session.backward(loss_of(model, 0, update))
            if update != 1:
                optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode(), session.evaluating():
                loss_of(model, 0, update)
        assert session.skipped == 1


def skipping_beside_a_stream(zeroes_first: bool) -> tuple[int, Tensor]:
    """Ranks tell each other before each batch whether they have one."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank()
    stream = (batch(rank, update) for update in range(1, 7))
    session = slipstream.accelerate(model, optimizer, stream, {"local": {"steps": 2}})
    for update, words in enumerate(session.loader, 1):
        if zeroes_first:
            optimizer.zero_grad()
        session.backward((model(words) * model.scale).square().mean())
        if not (update == 2 and rank):
            optimizer.step()
        if not zeroes_first:
            optimizer.zero_grad()
    skipped = session.skipped
    session.close()
    return skipped, flat(model.parameters())


@pytest.mark.parametrize("zeroes_first", [False, True], ids=["at the end", "first"])
def test_a_rank_that_skips_needs_no_other_for_its_next_batch(
    two: Ranks, zeroes_first: bool
) -> None:
    (none, first), (one, second) = two.run(skipping_beside_a_stream, zeroes_first)
    assert (none, one) == (0, 1)
    assert torch.equal(first, second)


def deals_its_work_out() -> None:
    model = build()
    strategy = {"local": {"steps": 4}}
    with slipstream.accelerate(model, Dealt(model.parameters()), None, strategy) as session:
        session.backward(loss_of(model, session.rank, 1))
        session.step()


def test_an_optimizer_that_exchanges_inside_its_step_is_refused(two: Ranks) -> None:
    for error in two.fail(deals_its_work_out).values():
        assert isinstance(error, ModelError)
        assert "Dealt.step() exchanges with other ranks" in str(error)


def exchanges_beside_its_steps(in_a_hook: bool) -> None:
    """As a mixture of experts does, which balances their load over ranks."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    load = torch.ones(2)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}}) as session:
        if in_a_hook:
            optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(load))
        for update in range(4):
            session.backward(loss_of(model, session.rank, update))
            if not in_a_hook:
                dist.all_reduce(load)
            session.step()


def test_a_hook_that_exchanges_around_a_step_is_told_where_to_go(two: Ranks) -> None:
    for error in two.fail(exchanges_beside_its_steps, True).values():
        assert "if a hook on its steps does that" in str(error)
        assert "call it between backward() and step()" in str(error)
    two.run(exchanges_beside_its_steps, False)


def a_second_deals_its_work_out() -> None:
    """As Muon beside Adam in modded-nanogpt."""
    model = build()
    head = [*model.parameters()][-1]
    other = Dealt(p for p in model.parameters() if p is not head)
    with slipstream.accelerate(
        model, SGD([head], lr=0.1), None, {"local": {"steps": 4}}
    ) as session:
        session.backward(loss_of(model, session.rank, 1))
        other.step()
        session.step()


def test_a_second_optimizer_that_exchanges_inside_its_step_is_refused(two: Ranks) -> None:
    for error in two.fail(a_second_deals_its_work_out).values():
        assert isinstance(error, ModelError)
        assert "Dealt.step() exchanges with other ranks" in str(error)


def looking(on: tuple[int, ...]) -> tuple[int, int, Tensor]:
    """Some ranks look at gradients of their own before each update, as for adversarial examples."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": 4}})
    for update in range(1, 9):
        for _ in range(2 * (session.rank in on)):
            with session.no_sync():
                session.backward(loss_of(model, session.rank, update + 50))
            optimizer.zero_grad()
        session.backward(loss_of(model, session.rank, update))
        session.step()
    counted = session.skipped, session.common_updates
    session.close()
    return *counted, flat(model.parameters())


@pytest.mark.parametrize("on", [(0, 1), (0,)], ids=["all ranks", "one rank"])
def test_gradients_that_a_rank_looks_at_in_no_sync_are_no_update(
    two: Ranks, on: tuple[int, ...]
) -> None:
    expected = two.run(looking, ())
    for (skipped, updates, values), (_, _, without) in zip(
        two.run(looking, on), expected, strict=True
    ):
        assert (skipped, updates) == (0, 8)
        assert torch.equal(values, without)


def with_gradients(own: bool) -> tuple[int, Tensor]:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}})
    for update in range(1, 6):
        loss = loss_of(model, session.rank, update)
        if own:  # as meta-learning assigns them
            gradients = torch.autograd.grad(loss, [*model.parameters()])
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        else:
            session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    updates = session.updates
    session.close()
    return updates, flat(model.parameters())


def test_ranks_meet_after_updates_with_gradients_of_the_scripts_own(two: Ranks) -> None:
    expected = two.run(with_gradients, False)
    found = two.run(with_gradients, True)
    assert [updates for updates, _ in found] == [5, 5]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def rows_of(rank: int) -> list[Tensor]:
    """The second rank has a single batch, the first one three."""
    return [batch(rank, update) for update in range(1, 2 if rank else 4)]


def without_a_batch(way: str) -> list[bool]:
    """Whether this rank's parameters have moved, in each step."""
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=way == "a scaler")
    rows = rows_of(torch.distributed.get_rank())
    moved = []
    with slipstream.accelerate(model, optimizer, rows, {"local": {"steps": 9}}) as session:
        for words in session.loader:
            optimizer.zero_grad(set_to_none=way != "zeros")
            loss = (model(words) * model.scale).square().mean()
            if way == "the graph meets others":
                loss = comm.all_reduce_mean(loss)
            session.backward(scaler.scale(loss))
            before = flat(model.parameters())
            if way == "a scaler":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(flat(model.parameters()), before))
    return moved


@pytest.mark.parametrize("way", ["a scaler", "zeros", "the graph meets others"])
def test_a_rank_without_a_batch_makes_no_update(two: Ranks, way: str) -> None:
    assert two.run(without_a_batch, way) == [[True] * 3, [True, False, False]]


def with_a_second_optimizer() -> list[bool]:
    """Whether what the other optimizer holds has moved on this rank, in each step."""
    model = build()
    first, second = SGD([model.scale], lr=0.1), AdamW(model[1].parameters(), lr=0.1)
    rows = rows_of(torch.distributed.get_rank())
    moved = []
    with slipstream.accelerate(model, first, rows, {"local": {"steps": 9}}) as session:
        for words in session.loader:
            second.zero_grad(set_to_none=False)
            session.backward((model(words) * model.scale).square().mean())
            before = flat(model[1].parameters())
            second.step()
            session.step()
            moved.append(not torch.equal(flat(model[1].parameters()), before))
    return moved


def test_a_second_optimizer_makes_none_either(two: Ranks) -> None:
    assert two.run(with_a_second_optimizer) == [[True] * 3, [True, False, False]]


def scaled(local: dict[str, int], skips: int, folder: str) -> tuple[list[int], list[Tensor]]:
    """A scaler skips an update of one rank, whose gradients are zeroed before the next backward:
    the checkpoints that there are, and the parameters that ranks have evaluated."""
    model = build().float()
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    saved = slipstream.Checkpoints(folder, also={"scaler": scaler})
    strategy = {"local": local}
    evaluated = []
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        for update in range(1, 7):
            optimizer.zero_grad()
            loss = loss_of(model, session.rank, update)
            overflows = update == 4 and session.rank == skips
            session.backward(scaler.scale(loss * torch.inf if overflows else loss))
            scaler.step(optimizer)
            scaler.update()
            saved.step(session, every=4)
            with session.evaluating():
                evaluated.append(flat(model.parameters()))
    return [int(path.name[-8:]) for path in saved.paths], evaluated


@pytest.mark.parametrize("skips", [0, 1])
@pytest.mark.parametrize("local", [{"steps": 2}, {"steps": 3, "delay": 1}], ids=str)
def test_ranks_save_and_evaluate_alike_behind_an_update_that_one_has_skipped(
    two: Ranks, local: dict[str, int], skips: int, tmp_path: Path
) -> None:
    (saved, first), (_, second) = two.run(scaled, local, skips, str(tmp_path))
    assert saved == [4]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def counted_alike() -> list[int]:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    counted = []
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 4}}) as session:
        for update in range(1, 6):
            session.backward(loss_of(model, session.rank, update))
            if not (update == 4 and session.rank):
                optimizer.step()
            optimizer.zero_grad()
            counted.append(session.common_updates)
    return counted


def test_a_skipped_update_counts_where_its_gradients_are_zeroed(two: Ranks) -> None:
    assert two.run(counted_alike) == [[1, 2, 3, 4, 5]] * 2


def zeroed_in_an_evaluation(inside: bool) -> Tensor:
    """All ranks skip the update at which they meet, and zero its gradients while they evaluate, or
    right after it."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}}) as session:
        for update in range(1, 6):
            session.backward(loss_of(model, session.rank, update))
            if update != 4:
                optimizer.step()
                optimizer.zero_grad()
            with session.evaluating():
                if inside:
                    optimizer.zero_grad()
                    assert session.between_updates
            optimizer.zero_grad()
    return flat(model.parameters())


def test_no_rank_meets_while_it_evaluates(two: Ranks) -> None:
    found, expected = (two.run(zeroed_in_an_evaluation, inside) for inside in (True, False))
    assert all(map(torch.equal, found, expected))
