"""Gradients that a script zeroes at its own time, and optimizers that the session does not know.

Each is compared with one process on the joined batch, or refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD

import slipstream
from slipstream.errors import ModelError, NonFiniteError, UsageError
from slipstream.pytree import tensors
from slipstream.session.stepless_updates import IN_A_ROW
from tests.harness.ranks import Ranks
from tests.session.test_habits import batches, loss_of, model_of, opened, plain

TRANSPORTS = ["flat", "sharded"]


def assert_equal(model: nn.Module, expected: list[torch.Tensor], within: float = 1e-12) -> None:
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=within, atol=within)


# Zeroing.


def zeroed_to_zeros(transport: str) -> None:
    """Once zeroed in place, the gradients of later updates count all the same."""
    model, optimizer, session = opened({"transport": transport})
    with session:
        for number, batch in enumerate(batches(5)):
            session.backward(loss_of(model, batch[dist.get_rank()]))
            if number == 1:
                optimizer.zero_grad(set_to_none=False)
            elif number == 3:
                session.step()
            else:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    assert_equal(model, plain([[0], [1], [2], [3], [4]], skipped=(1,)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_zeroed_in_place(two: Ranks, transport: str) -> None:
    two.run(zeroed_to_zeros, transport)


def zeros_left(transport: str | None) -> list[torch.Tensor]:
    """The last layer, unused in the third update, moves on by its momentum; None: plain."""
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"gradients": {"transport": transport}}
    session: Any = (
        None if transport is None else slipstream.accelerate(model, optimizer, None, given)
    )
    for number, batch in enumerate(batches(5)):
        used: Any = model[:2] if number == 2 else model  # type: ignore[index]
        if session is None:
            torch.stack([loss_of(used, x) for x in batch]).mean().backward()
        else:
            session.backward(loss_of(used, batch[dist.get_rank()]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if session is not None:
        session.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_zeros_that_a_script_leaves_are_gradients(two: Ranks, transport: str) -> None:
    expected = zeros_left(None)
    for found in two.run(zeros_left, transport):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def zeroed_at_the_top(to_none: bool, transport: str = "flat") -> str:
    model, optimizer, session = opened({"accumulate": 2, "transport": transport})
    rank = dist.get_rank() if dist.is_initialized() else 0
    with warnings.catch_warnings(action="ignore"), session:
        for batch in batches():
            optimizer.zero_grad(set_to_none=to_none)
            try:
                session.backward(loss_of(model, batch[rank]))
            except UsageError as error:
                return str(error)
            session.step()
    return ""


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_zeroing_inside_a_window_is_refused(two: Ranks, transport: str, to_none: bool) -> None:
    for text in two.run(zeroed_at_the_top, to_none, transport):
        assert "zeroed inside an accumulation window of 2" in text
        assert "leave optimizer.zero_grad() out" in text


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_inside_a_window_is_refused_on_one_process(to_none: bool) -> None:
    assert "zeroed inside an accumulation window of 2" in zeroed_at_the_top(to_none)


def zeroed_before_a_flush() -> str:
    model, optimizer, session = opened({"accumulate": 3})
    with warnings.catch_warnings(action="ignore"), session:
        session.backward(loss_of(model, batches()[0, dist.get_rank()]))
        session.step()
        optimizer.zero_grad()
        with pytest.raises(UsageError) as caught:
            session.flush()
    return str(caught.value)


def test_a_zeroed_window_is_not_flushed(two: Ranks) -> None:
    for text in two.run(zeroed_before_a_flush):
        assert "zeroed inside an accumulation window of 3" in text


def accumulated(transport: str) -> None:
    """Zeroing where a window begins or has ended is no mistake, nor in no_sync()."""
    model, optimizer, session = opened({"accumulate": 2, "transport": transport})
    rank = dist.get_rank()
    with session:
        for number, batch in enumerate(batches()):
            if number % 2 == 0:
                optimizer.zero_grad(set_to_none=False)
                with session.no_sync():  # to look at the gradients of this rank
                    session.backward(loss_of(model, batch[rank]))
                optimizer.zero_grad()
            session.backward(loss_of(model, batch[rank]))
            if session.step():
                model.zero_grad()
    assert_equal(model, plain([[0, 1], [2, 3]]))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_zeroing_between_windows(two: Ranks, transport: str) -> None:
    two.run(accumulated, transport)


# Gradients that the script keeps, or makes.


def kept(codec: str | None, sets_data: bool) -> None:
    """Averages of two losses, without ``clone()``: zeroing lets go of them, as torch does."""
    model, optimizer, session = opened({"codec": codec, "split": "per_gradient"})
    parameters = [*model.parameters()]
    with session:
        for batch in batches():
            of_losses = []
            for factor in (1.0, 3.0):
                optimizer.zero_grad()
                session.backward(factor * loss_of(model, batch[dist.get_rank()]))
                for p in parameters if sets_data else ():
                    assert p.grad is not None
                    p.grad.data = 1.0 * p.grad.data
                of_losses.append([p.grad for p in parameters])
            for p, one, other in zip(parameters, *of_losses, strict=True):
                assert one is not None
                assert other is not None
                p.grad = (other - one) / 2
            session.step()
    assert_equal(model, plain([[0], [1], [2], [3]]), within=2e-3 if codec else 1e-12)


@pytest.mark.parametrize("sets_data", [False, True], ids=["kept", "data set"])
@pytest.mark.parametrize("codec", [None, "half"])
def test_gradients_that_a_script_keeps_stay(two: Ranks, codec: str, sets_data: bool) -> None:
    two.run(kept, codec, sets_data)


def one_memory() -> None:
    """Where nobody keeps a gradient, none is copied."""
    model, _, session = opened({})
    places = set()
    with session:
        for batch in batches():
            session.backward(loss_of(model, batch[dist.get_rank()]))
            places.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
            places.add(tuple(id(p.grad) for p in model.parameters()))
            session.step()
    assert len(places) == 2


def test_gradients_that_nobody_keeps_are_the_same_tensors(two: Ranks) -> None:
    two.run(one_memory)


def made_by_hand(transport: str) -> None:
    """No backward pass of the session comes before: the script averages for itself."""
    model, optimizer, session = opened({"transport": transport})
    with session:
        for batch in batches():
            loss = torch.stack([loss_of(model, x) for x in batch]).mean()
            gradients = torch.autograd.grad(loss, [*model.parameters()])
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        assert session.updates == 4  # by which checkpoints are saved
    assert_equal(model, plain([[0], [1], [2], [3]]))


def given_to_backward(transport: str) -> None:
    """As the page of gradients writes it."""
    model, _, session = opened({"transport": transport})
    with session:
        for batch in batches():
            own = torch.autograd.grad(loss_of(model, batch[dist.get_rank()]), [*model.parameters()])
            products = [(p * g).sum() for p, g in zip(model.parameters(), own, strict=True)]
            session.backward(torch.stack(products).sum())
            session.step()
    assert_equal(model, plain([[0], [1], [2], [3]]))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", [made_by_hand, given_to_backward])
def test_gradients_of_the_scripts_own(two: Ranks, how: Any, transport: str) -> None:
    two.run(how, transport)


# Other optimizers.


def two_of_a_model(model: nn.Module) -> tuple[Any, Any]:
    first = SGD(model[2].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
    return first, SGD(model[0].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]


def both_step(order: str) -> None:
    model = model_of()
    mine, other = two_of_a_model(model)
    with slipstream.accelerate(model, mine) as session:
        for batch in batches():
            mine.zero_grad()
            other.zero_grad()
            session.backward(loss_of(model, batch[dist.get_rank()]))
            if order == "by hand":
                mine.step()
                other.step()
            else:
                other.step()
                session.step()
    assert_equal(model, plain([[0], [1], [2], [3]]))


@pytest.mark.parametrize("order", ["by hand", "before session.step()"])
def test_a_second_optimizer_of_the_model(two: Ranks, order: str) -> None:
    two.run(both_step, order)


def by_turns() -> tuple[int, int, float]:
    """Two optimizers by turns, as of a GAN in one session; a codec that sends one value of each
    eight, and owes the others."""
    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 8, bias=False))
    torch.nn.init.ones_(model[1].weight)  # type: ignore[arg-type]
    torch.nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    mine, other = (SGD(model[n].parameters(), lr=0.1) for n in (1, 0))
    codec = {"kind": "topk", "chunk": 8, "keep": 1}
    session = slipstream.accelerate(model, mine, None, {"gradients": {"codec": codec}})
    with session:
        for _ in range(4):
            session.backward(model[0](torch.arange(1.0, 9.0)).sum())
            other.step()
            other.zero_grad()
            session.backward(model[1](torch.ones(1)).sum())
            session.step()
        return session.updates, session.skipped, float(model[0].weight.count_nonzero())  # type: ignore[operator]


def test_an_update_by_another_optimizer_counts_and_settles_what_codecs_owe(two: Ranks) -> None:
    for updates, skipped, sent in two.run(by_turns):
        assert (updates, skipped) == (8, 0)
        assert sent > 1


def after_step(session: Any, other: Any, batch: torch.Tensor) -> None:
    session.backward(loss_of(session.model, batch))
    session.step()
    session.backward(loss_of(session.model, batch))
    session.step()
    other.step()


def in_window(session: Any, other: Any, batch: torch.Tensor) -> None:
    session.backward(loss_of(session.model, batch))
    other.step()


def in_backward(session: Any, other: Any, batch: torch.Tensor) -> None:
    def update(parameter: torch.Tensor) -> None:
        other.step()
        other.zero_grad()

    session.model[0].weight.register_post_accumulate_grad_hook(update)
    session.backward(loss_of(session.model, batch))


WRONG: list[Callable[..., None]] = [after_step, in_window, in_backward]


def refusals() -> list[str]:
    texts = []
    for wrong in WRONG:
        model = model_of()
        mine, other = two_of_a_model(model)
        session = slipstream.accelerate(model, mine, None, {"gradients": {"accumulate": 2}})
        with warnings.catch_warnings(action="ignore"):
            with pytest.raises(UsageError) as caught:
                wrong(session, other, batches()[0, dist.get_rank()])
            session.close()
        other.step()  # a closed session looks no more
        texts.append(str(caught.value))
    return texts


def test_a_second_optimizer_without_averages_is_refused(two: Ranks) -> None:
    for texts in two.run(refusals):
        for text in texts:
            assert "step of another optimizer (SGD)" in text
            assert "before session.step()" in text


class Sharpness(torch.optim.Optimizer):
    """Moves the weights, and back, around another optimizer; its own step needs a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.before: list[tuple[nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        self.before = [(p, p.data.clone()) for p in held]
        for p in held:
            p.add_(0.05 * p.grad)
        self.zero_grad()

    def second_step(self) -> None:
        for p, before in self.before:
            p.data = before
        self.base_optimizer.step()
        self.zero_grad()


def sharpness(strategy: dict[str, Any], inner: bool) -> list[torch.Tensor] | str:
    model = model_of()
    optimizer = Sharpness(model.parameters())
    given: Any = optimizer.base_optimizer if inner else optimizer
    with slipstream.accelerate(model, given, None, strategy) as session:
        for batch in batches():
            for verb in (optimizer.first_step, optimizer.second_step):
                joined = torch.stack([loss_of(model, x) for x in batch]).mean()
                session.backward(joined)
                try:
                    verb()
                except UsageError as error:
                    model.zero_grad()
                    return str(error)
        assert session.updates == 4
    return [p.detach() for p in model.parameters()]


def test_an_optimizer_around_the_one_that_steps(two: Ranks) -> None:
    """Its updates would all count as skipped: no checkpoint, no residual, no meeting."""
    expected = sharpness({}, inner=True)
    for strategy in ({}, {"local": {"steps": 2, "lr": 1.0, "momentum": 0.0}}):
        for found in two.run(sharpness, strategy, True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for text in two.run(sharpness, strategy, False):
            assert "accelerate(model, optimizer.base_optimizer)" in text


def test_a_second_optimizer_is_watched_also_after_a_step_that_raised() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    model = model_of()
    mine, other = two_of_a_model(model)
    batch = batches()[0, 0]
    with warnings.catch_warnings(action="ignore"), slipstream.accelerate(model, mine) as session:
        session.backward(loss_of(model, batch))
        hook = mine.register_step_pre_hook(fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            mine.step()
        hook.remove()
        model.zero_grad()
        with session.no_sync():
            session.backward(loss_of(model, batch))
            with pytest.raises(UsageError, match=r"step of another optimizer \(SGD\)"):
                other.step()


def steps_in_turn(rarely: str) -> list[torch.Tensor]:
    """Of two optimizers one steps at every second update, by the sum of two gradients, as Muon and
    Adam of modded-nanogpt; ``rarely``: which one that is."""
    model = model_of()
    mine, other = two_of_a_model(model)
    often, seldom = (other, mine) if rarely == "mine" else (mine, other)
    rank = dist.get_rank() if dist.is_initialized() else None
    session = None if rank is None else slipstream.accelerate(model, mine)
    for number, batch in enumerate(batches()):
        if session is None:
            torch.stack([loss_of(model, x) for x in batch]).mean().backward()
        else:
            session.backward(loss_of(model, batch[rank]))
        for optimizer in [often, seldom] if number % 2 else [often]:
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        session.close()
    return [p.detach() for p in model.parameters()]


def test_an_optimizer_that_steps_more_rarely_than_another(two: Ranks) -> None:
    expected = steps_in_turn("mine")
    for found in two.run(steps_in_turn, "mine"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_kept_for_a_rarer_optimizer_are_not_dropped_in_silence(two: Ranks) -> None:
    for error in two.fail(steps_in_turn, "other").values():
        assert isinstance(error, UsageError)
        assert "give accelerate() the optimizer that steps most rarely" in str(error)


def frozen_on_the_way(new: bool) -> list[torch.Tensor]:
    """The first layer is frozen when its last gradient is there, and only others are zeroed. A
    ``new`` optimizer steps these; the first one would move the frozen layer by that gradient."""
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = slipstream.accelerate(model, optimizer) if dist.is_initialized() else None
    for number, batch in enumerate(batches(5)):
        if number == 2:
            model.get_submodule("0").requires_grad_(False)
            if new:
                optimizer = SGD(model.get_submodule("2").parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
        if session is not None:
            session.backward(loss_of(model, batch[session.rank]))
        else:
            torch.stack([loss_of(model, x) for x in batch]).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    if session is not None:
        assert session.between_updates
        assert session.updates == 5  # those of the new one, too
        session.close()
    return [p.detach() for p in model.parameters()]


def test_a_new_optimizer_for_what_is_not_frozen(two: Ranks) -> None:
    expected = frozen_on_the_way(new=True)
    for found in two.run(frozen_on_the_way, True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_old_gradient_of_a_frozen_layer_is_not_dropped_in_silence(two: Ranks) -> None:
    for error in two.fail(frozen_on_the_way, False).values():
        assert isinstance(error, UsageError)
        assert "gradients of the last optimizer.step() are still there" in str(error)


def skipped_by_both(order: str) -> None:
    model = model_of()
    mine, other = two_of_a_model(model)
    checks = {"checks": {"nonfinite": "skip"}}
    with slipstream.accelerate(model, mine, None, checks) as session:
        for number, batch in enumerate(batches()):
            factor = torch.inf if number == 1 and dist.get_rank() == 1 else 1.0
            session.backward(loss_of(model, batch[dist.get_rank()]) * factor)
            other.step()
            if order == "by hand":
                mine.step()
                model.zero_grad()
            else:
                session.step()
        assert session.skipped == 1
    assert_equal(model, plain([[0], [1], [2], [3]], skipped=(1,)))


@pytest.mark.parametrize("order", ["by hand", "before session.step()"])
def test_a_second_optimizer_skips_an_update_with_the_session(two: Ranks, order: str) -> None:
    two.run(skipped_by_both, order)


def ended_before_both() -> str:
    model = model_of()
    mine, other = two_of_a_model(model)
    before = [p.detach().clone() for p in model.parameters()]
    session = slipstream.accelerate(model, mine)
    session.backward(loss_of(model, batches()[0, dist.get_rank()]) * torch.inf)
    with session, pytest.raises(NonFiniteError) as caught:
        other.step()
    assert_equal(model, before)
    return str(caught.value)


def test_a_second_optimizer_makes_no_step_with_infinite_gradients(two: Ranks) -> None:
    for text in two.run(ended_before_both):
        assert "The parameters are still those of update 0" in text


def stepped_by_another(strategy: dict[str, Any]) -> tuple[int, int]:
    """As by an object of the script's own that steps several optimizers."""
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    mine, other = (SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    with slipstream.accelerate(model, mine, None, strategy) as session:
        for batch in batches():
            session.backward(loss_of(model, batch[dist.get_rank()]))
            other.step()
            other.zero_grad()
        assert session.between_updates
        counted = session.updates, session.skipped
    triples = zip(model.parameters(), plain([[0], [1], [2], [3]]), before, strict=True)
    for ours, theirs, first in triples:  # a meeting comes a backward pass later than behind step()
        assert (ours - theirs).norm() < 0.1 * (theirs - first).norm()
    return counted


@pytest.mark.parametrize("strategy", [{}, {"local": {"steps": 1, "lr": 1, "momentum": 0}}])
def test_an_update_by_another_optimizer_alone_counts(two: Ranks, strategy: Any) -> None:
    assert two.run(stepped_by_another, strategy) == [(4, 0)] * 2


def infinite_for_one() -> None:
    """Of two optimizers the script lets one step alone, as a scaler does, whose gradients are
    finite."""
    model = model_of()
    mine, other = two_of_a_model(model)
    own = [p for group in mine.param_groups for p in group["params"]]
    gradients = {**FEEDBACK["gradients"], "split": "per_gradient"}
    with slipstream.accelerate(model, mine, None, {"gradients": gradients}) as session:
        for number, batch in enumerate(batches(6)):
            before = [p.detach().clone() for p in own]
            loss = loss_of(model, batch[dist.get_rank()])
            infinite = own[0].sum() * torch.inf if number == 1 else 0.0
            session.backward(loss + infinite)
            if finite := all(p.grad.isfinite().all() for p in own):
                mine.step()
            other.step()
            model.zero_grad()
            assert finite is (number != 1)
            moved = [not torch.equal(p, q) for p, q in zip(own, before, strict=True)]
            assert any(moved) is finite


def test_a_codec_keeps_nothing_infinite_where_another_optimizer_steps(two: Ranks) -> None:
    two.run(infinite_for_one)


def test_a_scaler_skips_also_a_fused_step_of_a_second_optimizer() -> None:
    model = model_of()
    first, *rest = model.parameters()
    optimizers = [SGD(own, lr=0.1, momentum=0.9, fused=True) for own in ([first], rest)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with slipstream.accelerate(model, optimizers[0]) as session:
        for number, batch in enumerate(batches()):
            loss = (loss_of(model, batch[0]) + loss_of(model, batch[1])) / 2
            session.backward(scaler.scale(loss * (torch.inf if number == 1 else 1.0)))
            for optimizer in reversed(optimizers):
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        assert session.updates == 3
    assert_equal(model, plain([[0], [1], [2], [3]], skipped=(1,)))


def test_gradients_that_were_kept_and_zeroed_later_bar_no_step() -> None:
    model = model_of()
    mine, other = two_of_a_model(model)
    with slipstream.accelerate(model, mine) as session:
        first, second, third, _ = batches()
        session.backward(loss_of(model, first[0]))
        mine.step()
        mine.zero_grad()  # those of the other one stay
        session.backward(loss_of(model, second[0]))
        model.zero_grad()
        session.backward(loss_of(model, third[0]))
        other.step()
        session.step()
        assert (session.updates, session.skipped) == (2, 1)


def another_around() -> torch.optim.Optimizer:
    return Around(SGD(model_of().parameters(), lr=0.1))


def moves(optimizer: torch.optim.Optimizer) -> bool:
    (parameter, *_) = optimizer.param_groups[0]["params"]
    was, parameter.grad = parameter.detach().clone(), torch.ones_like(parameter)
    optimizer.step()
    return not torch.equal(was, parameter)


def test_others_of_its_class_step_beside_an_optimizer_around_another() -> None:
    model = model_of()
    before, given = another_around(), Around(SGD(model.parameters(), lr=0.1))
    with slipstream.accelerate(model, given):
        assert all(moves(around) for around in (before, another_around()))
    assert moves(before)


def met_by_graphs_that_wait() -> int:
    model = model_of()
    mine, other = (SGD(model.parameters(), lr=0.1) for _ in range(2))
    local = {"local": {"steps": 1}}
    with slipstream.accelerate(model, mine, None, local) as session:
        for batch in batches(6):
            session.backward(loss_of(model, batch[dist.get_rank()]), retain_graph=True)
            other.step()
            model.zero_grad()
        return session._loop.local.meetings  # type: ignore[union-attr]


def test_graphs_that_wait_do_not_hold_meetings_up_for_ever(two: Ranks) -> None:
    for meetings in two.run(met_by_graphs_that_wait):
        assert meetings >= 3


class Zeroes(SGD):
    """An optimizer of before torch 1.7, that fails once."""

    fails = False

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_an_optimizer_that_zeroes_in_its_own_way() -> None:
    model = model_of()
    optimizer = Zeroes(model.parameters(), lr=0.1, momentum=0.9)
    with slipstream.accelerate(model, optimizer) as session:
        for batch in batches():
            session.backward((loss_of(model, batch[0]) + loss_of(model, batch[1])) / 2)
            session.step()
    assert_equal(model, plain([[0], [1], [2], [3]]))


def test_a_step_by_hand_that_raised_counts_once_on_one_process() -> None:
    model = model_of()
    optimizer = Zeroes(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer) as session:
        session.backward(loss_of(model, batches()[0, 0]))
        optimizer.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        optimizer.fails = False
        session.step()
        assert session.updates == 1


class Around(torch.optim.Optimizer):
    """Lookahead and its kin, which do not call ``super().__init__()``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Holder:
    """Apex's LARC and its kin, which are no optimizers of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()


WAYS: dict[str | None, Any] = {"around": Around, "held": Holder, "made later": lambda own: own}
FEEDBACK = {"gradients": {"codec": {"kind": "int8", "error_feedback": True}}}
MEETS = {"local": {"steps": 2, "lr": 1.0, "momentum": 0.0}}


def by_hand(way: str | None, strategy: dict[str, Any]) -> tuple[int, int, torch.Tensor]:
    """Steps by hand of an optimizer, or of one around it, or of one that a script makes later."""
    model = model_of()
    own: Any = SGD(model.parameters(), lr=0.1)
    given = WAYS.get(way, lambda own: own)(own)
    session = slipstream.accelerate(model, given, None, strategy)
    steps = SGD(model.parameters(), lr=0.1) if way == "made later" else given
    for batch in batches(7):
        session.backward(loss_of(model, batch[dist.get_rank()]))
        steps.step()
        steps.zero_grad()
    session.state_dict()
    counts = session.updates, session.skipped
    session.close()
    return *counts, torch.cat([p.detach().view(-1) for p in model.parameters()])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_an_optimizer_inside_is_an_update(two: Ranks, way: str) -> None:
    """Codecs keep what they owe, as they do where the session sees the step itself."""
    for (*counts, found), (*_, expected) in zip(
        two.run(by_hand, way, FEEDBACK), two.run(by_hand, None, FEEDBACK), strict=True
    ):
        assert counts == [7, 0]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_meet_count_the_steps_of_an_optimizer_inside(two: Ranks, way: str) -> None:
    start = torch.cat([p.detach().view(-1) for p in model_of().parameters()])
    (*_, expected), _ = two.run(by_hand, None, MEETS)
    (*counts, first), (*_, second) = two.run(by_hand, way, MEETS)
    assert counts == [7, 0]
    assert torch.equal(first, second)
    assert (first - expected).norm() < 0.2 * (expected - start).norm()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_model_with_scripted_layers_trains() -> None:
    model: Any = model_of()
    model[0], model[2] = torch.jit.script(model[0]), torch.jit.script(model[2])
    with slipstream.accelerate(model, SGD(model.parameters(), lr=0.1, momentum=0.9)) as session:
        for batch in batches():
            session.backward((loss_of(model, batch[0]) + loss_of(model, batch[1])) / 2)
            session.step()
    assert_equal(model, plain([[0], [1], [2], [3]]))


# Skipped updates, states.


def skipped_by_hand() -> tuple[int, int]:
    model, optimizer, session = opened({})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with session:
        for number, batch in enumerate(batches()):
            loss = loss_of(model, batch[dist.get_rank()])
            factor = torch.inf if number == 1 and dist.get_rank() == 1 else 1.0
            session.backward(scaler.scale(loss * factor))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        open_ = session.skipped
    return open_, session.skipped


def test_updates_that_the_script_skips_are_counted(two: Ranks) -> None:
    assert two.run(skipped_by_hand) == [(1, 1)] * 2


def saved_behind_a_skipped_update(gradients: dict[str, Any]) -> None:
    """In a loop that zeroes first, what a scaler has left out is there when the epoch ends."""
    model, optimizer, session = opened(gradients)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with session:
        for number, batch in enumerate(batches()):
            optimizer.zero_grad()
            factor = torch.inf if number == 1 and dist.get_rank() == 1 else 1.0
            session.backward(scaler.scale(loss_of(model, batch[dist.get_rank()]) * factor))
            scaler.step(optimizer)
            scaler.update()
            if number == 1:
                saved = session.checkpoint()["session"]
                session.load_state_dict(saved)
                assert (session.updates, session.skipped) == (1, 1)
                assert all(t.isfinite().all() for t in tensors(saved["codecs"]))
    if not gradients:
        assert_equal(model, plain([[0], [1], [2], [3]], skipped=(1,)))


@pytest.mark.parametrize("codec", [None, {"kind": "int8", "error_feedback": True}])
def test_a_state_is_saved_behind_an_update_that_a_scaler_skips(two: Ranks, codec: Any) -> None:
    two.run(saved_behind_a_skipped_update, {} if codec is None else {"codec": codec})


@pytest.mark.parametrize("nonfinite", ["raise", "allow"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_also_a_fused_step_and_the_last_one(fused: bool, nonfinite: str) -> None:
    """And nothing is told of gradients that close() would drop."""
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checks = {"checks": {"nonfinite": nonfinite}}
    with slipstream.accelerate(model, optimizer, strategy=checks) as session:
        for number, batch in enumerate(batches()):
            loss = (loss_of(model, batch[0]) + loss_of(model, batch[1])) / 2
            session.backward(scaler.scale(loss * (torch.inf if number in (1, 3) else 1.0)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert session.updates == 2
    assert session.skipped == 2
    assert_equal(model, plain([[0], [1], [2], [3]], skipped=(1, 3)))


def load_too_late(gradients: dict[str, Any]) -> str:
    model, _, session = opened(gradients)
    with warnings.catch_warnings(action="ignore"), session:
        state = session.state_dict()
        session.backward(loss_of(model, batches()[0, dist.get_rank()]))
        with pytest.raises(UsageError) as caught:
            session.load_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize("gradients", [{"transport": "sharded"}, {"accumulate": 2}])
def test_a_state_is_not_loaded_over_gradients(two: Ranks, gradients: dict[str, Any]) -> None:
    for text in two.run(load_too_late, gradients):
        assert "session.flush()" in text


def replaced_in_a_group() -> str:
    """Torch does not tell of either write."""
    model, optimizer, session = opened({})
    with session:
        session.backward(loss_of(model, batches()[0, dist.get_rank()]))
        session.step()
        weight = nn.Parameter(model[0].bias.detach().clone())  # type: ignore[index]
        model[0]._parameters["bias"] = weight  # type: ignore[index]
        optimizer.param_groups[0]["params"][1] = weight
        session.backward(loss_of(model, batches()[0, dist.get_rank()]))
        with pytest.raises(UsageError) as caught:
            session.step()
    return str(caught.value)


def test_a_parameter_replaced_in_a_group_is_refused(two: Ranks) -> None:
    for text in two.run(replaced_in_a_group):
        assert "group 0 holds a parameter of shape (6,) (number 1)" in text


# What is around the model.


def wrapped(when: str) -> str:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs = batches()[0, dist.get_rank()]
    ddp = nn.parallel.DistributedDataParallel(model) if when == "before" else None
    session = slipstream.accelerate(model, optimizer)
    ddp = ddp or nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        ddp(inputs)
    with pytest.raises(UsageError) as caught:
        ddp(inputs)
    session.backward(loss_of(session.model, inputs))
    session.step()
    session.close()
    ddp(inputs)
    return str(caught.value)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_through_ddp_is_refused(two: Ranks, when: str) -> None:
    for text in two.run(wrapped, when):
        assert "call session.model, the plain module" in text


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = model_of()
    with pytest.raises(ModelError, match=r"LBFGS\.step\(\) needs a closure"):
        slipstream.accelerate(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.AdamW])
def test_a_state_that_torch_lets_an_optimizer_make_is_no_update(optimizer: Any) -> None:
    model = model_of()
    own = optimizer(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, own) as session:
        state = get_optimizer_state_dict(model, own)
        set_optimizer_state_dict(model, own, state)
        assert session.updates == 0


def test_a_state_of_another_model_is_refused() -> None:
    _, _, session = opened({})
    with session, pytest.raises(ModelError, match=r"Missing key.*0\.weight"):
        session.restore({"model": {}})


def run_of(model: nn.Module, state: Any = None) -> Any:
    """The state after an update of a session that goes on from ``state``."""
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer) as session:
        if state is not None:
            session.restore(state)
        session.backward(loss_of(model, batches()[0, session.rank]))
        session.step()
        return deepcopy(session.checkpoint())


def without_compiler() -> None:
    """As nanoGPT, which takes the prefix off the model that it loads."""
    state = run_of(torch.compile(model_of(), backend="eager"))
    model = {name.removeprefix("_orig_mod."): value for name, value in state["model"].items()}
    with pytest.raises(UsageError, match=r"_orig_mod\. before names is of torch\.compile\(model\)"):
        run_of(model_of(), {**state, "model": model})
    run_of(model_of(), {"model": model, "optimizer": state["optimizer"]})


def test_a_state_of_a_compiled_model_says_how_a_plain_one_takes_it(two: Ranks) -> None:
    two.run(without_compiler)


def updated_by_hand(strategy: dict[str, Any] | None, updates: int) -> list[torch.Tensor]:
    """As the first loop of torch's word_language_model, which has no optimizer."""
    model = model_of()
    unused = SGD(model.parameters(), lr=0.1)
    session = None if strategy is None else slipstream.accelerate(model, unused, strategy=strategy)
    for batch in batches(updates):
        model.zero_grad()
        if session is None:
            torch.stack([loss_of(model, x) for x in batch]).mean().backward()
        else:
            session.backward(loss_of(model, batch[session.rank]))
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)
    if session is not None:
        assert "or the script zeroed them" in " ".join(session.report().split())
        session.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "strategy",
    [
        {"gradients": {"codec": {"kind": "topk", "chunk": 8, "keep": 4}}},
        {"gradients": {"codec": {"kind": "dgc", "density": 1.0, "warmup_steps": 0}}},
        {"local": {"steps": 4}},
    ],
    ids=["topk", "dgc", "local"],
)
def test_updates_by_hand_are_refused_where_they_go_wrong(two: Ranks, strategy: Any) -> None:
    """They count as skipped: codecs forget what they owe, and meetings undo them."""
    for error in two.fail(updated_by_hand, strategy, IN_A_ROW + 2).values():
        assert isinstance(error, UsageError)
        assert "updates by hand" in str(error)
        assert "Call session.step()" in str(error)


def updated_by_hand_with_a_warning(updates: int) -> tuple[list[torch.Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = updated_by_hand({}, updates)
    return found, [str(one.message) for one in caught if one.filename == __file__]


def test_updates_by_hand_are_warned_of_where_they_are_right(two: Ranks) -> None:
    expected = updated_by_hand(None, IN_A_ROW + 5)
    for found, said in two.run(updated_by_hand_with_a_warning, IN_A_ROW + 5):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert sum("updates by hand" in text for text in said) == 1


def in_no_sync(session: Any) -> None:
    with session.no_sync():
        pass


VERBS: dict[str, Callable[[Any], object]] = {
    "checkpoint": lambda session: session.checkpoint(),
    "state_dict": lambda session: session.state_dict(),
    "restore": lambda session: session.restore({"model": session.model.state_dict()}),
    "between_updates": lambda session: session.between_updates,
    "no_sync": in_no_sync,
    "close": lambda session: session.close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_warning_names_the_line_of_the_script(verb: str) -> None:
    model = model_of()
    session = slipstream.accelerate(model, SGD(model.parameters(), lr=0.1))
    for batch in batches(IN_A_ROW):
        session.backward(loss_of(model, batch[0]))
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)
        model.zero_grad()
    act = VERBS[verb]
    with pytest.warns(UserWarning, match="updates by hand") as caught:
        act(session)
    [one] = caught
    session.close()
    first = act.__code__.co_firstlineno
    assert (one.filename, one.lineno) == (__file__, first + (verb == "no_sync"))


def moved_and_back(moves: int) -> int:
    """As sharpness-aware minimisation of several steps: weights move before each update."""
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    strategy = {"gradients": {"codec": {"kind": "topk", "chunk": 8, "keep": 4}}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        for batch in batches(IN_A_ROW):
            before = [p.detach().clone() for p in model.parameters()]
            for _ in range(moves):
                session.backward(loss_of(model, batch[session.rank]))
                for p in model.parameters():
                    assert p.grad is not None
                    p.data.add_(p.grad, alpha=0.01)
                optimizer.zero_grad()
            session.backward(loss_of(model, batch[session.rank]))
            for p, values in zip(model.parameters(), before, strict=True):
                p.data.copy_(values)
            session.step()
        return int(session.updates)


def no_update_by_hand(how: str) -> int:
    """Passes before the first update of a script that measures; the warnings of it."""
    model, teacher = model_of(), model_of().requires_grad_(how != "a teacher that follows")
    both = nn.ModuleList([model, teacher])
    session = slipstream.accelerate(both, SGD(model.parameters(), lr=0.1))
    if how == "not a number":
        torch.nn.init.constant_(teacher[0].weight, torch.nan)
    with warnings.catch_warnings(record=True) as seen, session, torch.no_grad():
        warnings.simplefilter("always")
        for batch in batches(IN_A_ROW + 2):
            before = [p.clone() for p in model.parameters()]
            for p in model.parameters() if how == "sharpness" else ():
                p.add_(0.1 * torch.rand_like(p))
            with torch.enable_grad():
                session.backward(loss_of(model, batch[0]))
            for p, values in zip(model.parameters(), before, strict=True):
                p.copy_(values)
            for p in teacher.parameters() if how == "a teacher that follows" else ():
                p.mul_(0.99)
            both.zero_grad()
        return sum("updates by hand" in str(w.message) for w in seen)


@pytest.mark.parametrize("how", ["sharpness", "a teacher that follows", "not a number"])
def test_what_is_no_update_by_hand(how: str) -> None:
    assert no_update_by_hand(how) == 0


def test_weights_that_move_before_an_update_are_no_update_by_hand(two: Ranks) -> None:
    assert two.run(moved_and_back, 3) == [IN_A_ROW, IN_A_ROW]


# A loss of another session that runs through the model.


def generators_loss(accumulate: int, how: str) -> tuple[list[str], list[torch.Tensor]]:
    """A critic and its generator; ``how`` the critic is kept out of the generator's loss."""
    critic, generator = model_of(), nn.Linear(5, 5).double()
    strategy = {"gradients": {"accumulate": accumulate}}
    of = [
        slipstream.accelerate(m, SGD(m.parameters(), lr=0.1, momentum=0.9), None, strategy)
        for m in (critic, generator)
    ]
    with warnings.catch_warnings(record=True) as seen, of[0], of[1]:
        warnings.simplefilter("always")
        for batch in batches():
            x = batch[of[0].rank]
            of[0].backward(loss_of(critic, x))
            of[0].step()
            critic.requires_grad_(how != "frozen")
            with of[0].no_sync() if how != "frozen" else contextlib.nullcontext():
                of[1].backward(loss_of(critic, generator(x)))
            critic.requires_grad_(True)
            of[1].step()
            if how == "zeroed":
                critic.zero_grad()
    return [str(w.message) for w in seen], [p.detach() for p in critic.parameters()]


@pytest.mark.parametrize("how", ["frozen", "zeroed"])
def test_a_loss_of_another_session_may_run_through_a_model(two: Ranks, how: str) -> None:
    accumulate = 2 if how == "frozen" else 1
    windows = [[0, 1], [2, 3]] if how == "frozen" else [[0], [1], [2], [3]]
    for said, found in two.run(generators_loss, accumulate, how):
        assert said == []
        torch.testing.assert_close(found, plain(windows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["a loss of the script", "a look", "zeroed in place"])
def test_what_no_loss_of_another_session_has_added(how: str) -> None:
    critic, generator = model_of(), nn.Linear(5, 5).double()
    strategy = {"gradients": {"accumulate": 1 if how == "zeroed in place" else 2}}
    of = [
        slipstream.accelerate(m, SGD(m.parameters(), lr=0.1), None, strategy)
        for m in (critic, generator)
    ]
    x = next(iter(batches()))[0]
    with warnings.catch_warnings(record=True) as seen, of[0], of[1]:
        warnings.simplefilter("always")
        if how == "a look":
            with of[0].no_sync():
                of[0].backward(loss_of(critic, x))
            critic.zero_grad()
        else:
            of[0].backward(loss_of(critic, x))
            of[0].step()
        with of[0].no_sync():
            through = how != "a loss of the script"
            if not through:
                loss_of(critic, x).backward()
            made = generator(x)
            of[1].backward(loss_of(critic, made) if through else made.square().mean())
            of[1].step()
            if how == "zeroed in place":
                critic.zero_grad(set_to_none=False)
        if how == "a look":
            critic.zero_grad()
        of[0].backward(loss_of(critic, x))
        of[0].step()
    assert [str(w.message) for w in seen if "another session" in str(w.message)] == []


def test_what_a_loss_of_another_session_leaves_is_told(two: Ranks) -> None:
    """The update took it for its own, without a word."""
    for said, _ in two.run(generators_loss, 1, "kept"):
        assert len(said) == 1
        assert "0.weight has gradients that the backward() of another session has left" in said[0]
        assert "before its forward there: model.requires_grad_(False)" in said[0]


def test_a_loss_of_another_session_adds_nothing_to_an_open_window() -> None:
    with (
        warnings.catch_warnings(action="ignore"),  # of what is dropped at the end
        pytest.raises(UsageError, match=r"another session .* 0\.weight inside an accumulation win"),
    ):
        generators_loss(2, "kept")
