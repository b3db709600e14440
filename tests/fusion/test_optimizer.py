"""A fused optimizer against the user's own: values, states, checkpoints, schedulers, calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.fusion import fuse_optimizer, small_parameters
from slipstream.optim import Lamb
from tests.fusion.optimizers import (
    OPTIMIZERS,
    C,
    Lion,
    Make,
    check_same,
    fuse,
    give_gradients,
    groups,
    parameters,
)

IN_BLOCKS = [name for name in OPTIMIZERS if not name.startswith(("SGD", "Adam,", "AdamW", "Lamb"))]
IN_BLOCKS = [name for name in IN_BLOCKS if name not in ("Adam", "Adagrad")]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small_parameters.SMALL, "cpu", 50)
    monkeypatch.setattr(small_parameters, "BLOCK", 16)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_the_user_s_optimizer(name: str, dtype: torch.dtype) -> None:
    mine, plain = parameters(dtype=dtype), parameters(dtype=dtype)
    ours, theirs = OPTIMIZERS[name](groups(mine)), OPTIMIZERS[name](groups(plain))
    fused = fuse(ours)
    schedules = [C.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    for number in range(7):
        for made, optimizer in ((mine, ours), (plain, theirs)):
            give_gradients(made, number)
            if number == 3:  # a parameter that had no part in the loss
                made[1].grad = made[6].grad = None
            optimizer.step()
        check_same(ours, theirs, 1e-5 if dtype == torch.float32 else 1e-12)
        for schedule in schedules:
            schedule.step()
    fused.close()
    give_gradients(mine, 9)
    give_gradients(plain, 9)
    ours.step()
    theirs.step()
    check_same(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_go_both_ways(name: str) -> None:
    mine, plain = parameters(), parameters()
    ours, theirs = OPTIMIZERS[name](groups(mine)), OPTIMIZERS[name](groups(plain))
    fuse(ours)
    for number in range(6):
        give_gradients(mine, number)
        give_gradients(plain, number)
        ours.step()
        theirs.step()
        saved = [copy.deepcopy(o.state_dict()) for o in (ours, theirs)]
        ours.load_state_dict(saved[1])  # of the plain run, and the other way round
        theirs.load_state_dict(saved[0])
    check_same(ours, theirs)


@pytest.mark.parametrize("name", ["RMSprop", "AdamW", "Lion"])
def test_a_fused_run_goes_on_from_a_plain_one(name: str) -> None:
    mine, plain = parameters(), parameters()
    ours, theirs = OPTIMIZERS[name](groups(mine)), OPTIMIZERS[name](groups(plain))
    for number in range(6):
        give_gradients(mine, number)
        give_gradients(plain, number)
        fused = fuse(ours) if number == 3 else None
        ours.step()
        theirs.step()
        assert fused is None or "->" in fused.report_rows()[0].value
    check_same(ours, theirs)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_are_few(name: str) -> None:
    seen: list[int] = []
    made = parameters()
    optimizer = OPTIMIZERS[name](made)
    fused = fuse(optimizer)
    for number in range(2):
        give_gradients(made, number)
        hook = optimizer.register_step_pre_hook(
            lambda o, *_: seen.append(len(o.param_groups[0]["params"]))
        )
        optimizer.step()
        hook.remove()
    kind = type(optimizer).__name__
    assert seen == [8, 8]  # hooks see the user's parameters
    # two large ones, small matrices, vectors with a number
    assert fused.report_rows()[0].value == f"8 {kind} updates -> 4"


def test_many_small_parameters_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_parameters, "BLOCK", 2**18)
    made = [nn.Parameter(torch.randn(3, 3)) for _ in range(161)]
    optimizer = C.RMSprop(made)
    fused = fuse(optimizer)
    for p in made:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert fused.report_rows()[0].value == "161 RMSprop updates -> 1"
    assert optimizer.state[made[0]]["square_avg"].shape == (3, 3)


def test_states_stay_where_they_are_and_blocks_leave_none() -> None:
    made = parameters()
    optimizer = C.Adamax(made)
    fused = fuse(optimizer)
    where = []
    for number in range(3):
        give_gradients(made, number)
        optimizer.step()
        where.append(optimizer.state[made[1]]["exp_avg"].data_ptr())
        assert {*optimizer.state} == {*made}
    assert len({*where}) == 1
    fused.close()
    assert optimizer.state[made[1]]["exp_avg"]._base is None


def test_a_copy_of_an_optimizer_can_be_fused() -> None:
    made = parameters()
    optimizer = copy.deepcopy(Lamb(made, lr=0.01))
    copied = optimizer.param_groups[0]["params"]
    fuse(optimizer)
    give_gradients(copied, 0)
    optimizer.step()
    assert not copied[0].equal(made[0])


@pytest.mark.parametrize("name", ["RMSprop", "AdamW", "Lion"])
def test_a_closure_is_stepped_as_it_is(name: str) -> None:
    mine, plain = parameters(), parameters()
    ours, theirs = OPTIMIZERS[name](mine), OPTIMIZERS[name](plain)
    fuse(ours)
    for number in range(3):
        for made, optimizer in ((mine, ours), (plain, theirs)):

            def closure(made: list[nn.Parameter] = made, number: int = number) -> float:
                give_gradients(made, number)
                return float(number)

            assert optimizer.step(closure) == number
    check_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("make", [lambda p: C.SGD(p, lr=0.1), lambda p: C.Adagrad(p, lr=0.1)])
def test_sparse_gradients_are_stepped_as_they_are(make: Make) -> None:
    both = []
    for fused in (False, True):
        embedding = nn.Embedding(6, 3, sparse=True)
        nn.init.ones_(embedding.weight)
        optimizer = make(embedding.parameters())
        if fused:
            fuse(optimizer)
        embedding(torch.tensor([1, 4])).sum().backward()
        optimizer.step()
        both.append(embedding.weight.detach())
    assert both[0].equal(both[1])


def test_a_step_that_raises_leaves_the_user_s_parameters() -> None:
    made = parameters()
    optimizer = Lion(made)
    fuse(optimizer)
    give_gradients(made, 0)
    optimizer.param_groups[0]["decay"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.state_dict()
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, made)]


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum", "RMSprop"])
def test_gradients_in_another_order_and_parameters_with_holes(name: str) -> None:
    both = []
    for fused in (False, True):
        torch.manual_seed(0)
        turned = nn.Parameter(torch.randn(6, 5).t())
        kernel = nn.Parameter(torch.randn(3, 1, 3, 3).to(memory_format=torch.channels_last))
        holes = nn.Parameter(torch.randn(8, 6)[:, ::2])
        optimizer = OPTIMIZERS[name]([{"params": [turned, kernel]}, {"params": [holes]}])
        handle = fuse(optimizer) if fused else None
        for _ in range(3):
            for p in (turned, kernel, holes):
                p.grad = torch.randn(p.shape)
            optimizer.step()
        both.append(optimizer)
        if handle is not None and name != "RMSprop":
            assert handle.report_rows()[0].value.endswith("updates -> 2")
    check_same(both[1], both[0])


def test_an_unknown_class_must_be_vouched_for() -> None:
    with pytest.raises(ModelError, match=r"Lion cannot be fused.*fuse_optimizer: elementwise"):
        fuse_optimizer(Lion(parameters()))


def test_parameters_that_move_are_found_again() -> None:
    mine, plain = parameters(), parameters()
    ours, theirs = C.RMSprop(mine, lr=0.01), C.RMSprop(plain, lr=0.01)
    fuse(ours)
    for number in range(4):
        give_gradients(mine, number)
        give_gradients(plain, number)
        if number == 2:
            for p in mine:  # to other memory, in another order
                p.data = p.data.t().clone(memory_format=torch.contiguous_format).t()
                p.grad = torch.empty_like(p).copy_(p.grad)
        ours.step()
        theirs.step()
    check_same(ours, theirs)
