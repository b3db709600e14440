"""What holds for every variant: bitwise a plain loop, few operations, a state that resumes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from slipstream.optim import Lamb, Lars
from tests.harness.dispatched import Dispatched
from tests.optim.variants import VARIANTS, Named, give_gradients, parameters, same, values

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def moved(optimizer: Lars | Lamb, named: Named, steps: range, step: Callable[[], Any]) -> None:
    for number in steps:
        give_gradients(named, number)
        step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_variant
def test_it_is_a_plain_loop_bit_for_bit(variant: str, dtype: torch.dtype, tensor_lr: bool) -> None:
    make = VARIANTS[variant]
    lr = torch.tensor(make.settings["lr"]) if tensor_lr else make.settings["lr"]
    named, plain = parameters(dtype=dtype), parameters(dtype=dtype)
    fast, slow = make(named, lr=lr), make(plain, lr=lr)
    before = values(named)
    moved(fast, named, range(5), fast.step)
    moved(slow, plain, range(5), lambda: make.one_by_one(slow))
    assert same(values(named), values(plain))
    for (_, p), (_, q) in zip(named, plain, strict=True):
        assert fast.state[p].keys() == slow.state[q].keys()
        for key, kept in fast.state[p].items():
            assert torch.equal(torch.as_tensor(kept), torch.as_tensor(slow.state[q][key])), key
    still = [name for (name, p), b in zip(named, before, strict=True) if torch.equal(p, b)]
    assert still == ["empty.weight", "unused.weight"]


@every_variant
def test_mixed_dtypes_and_groups_are_a_plain_loop_bit_for_bit(variant: str) -> None:
    make = VARIANTS[variant]

    def build() -> tuple[Named, Lars | Lamb]:
        named, groups = [], []
        for number, dtype in enumerate(DTYPES):
            some = parameters(dtype=dtype)
            group = {"params": some, "weight_decay": 0.02 * (number % 2)}
            groups.append(group)
            named += some
        return named, make(groups)

    (named, fast), (plain, slow) = build(), build()
    moved(fast, named, range(3), fast.step)
    moved(slow, plain, range(3), lambda: make.one_by_one(slow))
    assert same(values(named), values(plain))


def operations(variant: str, *, copies: int, plain: bool = False) -> list[str]:
    """What the second step of a network of ``copies`` times seven parameters dispatches."""
    make, named = VARIANTS[variant], parameters(copies=copies)
    optimizer = make(named)
    moved(optimizer, named, range(1), optimizer.step)
    give_gradients(named, 1)
    counted = Dispatched()
    with counted:
        make.one_by_one(optimizer) if plain else optimizer.step()
    return counted.names


@every_variant
def test_more_parameters_are_no_more_operations(variant: str) -> None:
    few, many = operations(variant, copies=2), operations(variant, copies=32)
    assert few == many
    assert len(few) <= 100
    assert sum("_foreach" in name for name in few) >= 2


@every_variant
def test_nothing_waits_for_the_device(variant: str) -> None:
    waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")
    assert [n for n in operations(variant, copies=2) if n.partition(".")[0] in waits] == []


@pytest.mark.parametrize("variant", ["lars", "lamb"])
def test_the_counter_sees_a_loop(variant: str) -> None:
    few = operations(variant, copies=2, plain=True)
    many = operations(variant, copies=32, plain=True)
    assert len(many) > 10 * len(few)
    assert any("_local_scalar_dense" in name for name in few)


@every_variant
def test_it_runs_where_tensors_have_no_values(variant: str) -> None:
    named = parameters(device="meta")
    optimizer = VARIANTS[variant](named)
    moved(optimizer, named, range(2), optimizer.step)
    assert {
        kept.device.type
        for state in optimizer.state.values()
        for kept in state.values()
        if isinstance(kept, torch.Tensor)
    } <= {"meta"}


def gradients(named: Named) -> list[torch.Tensor]:
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


@every_variant
def test_gradients_are_left_as_they_are(variant: str) -> None:
    named, untouched = parameters(), parameters()
    optimizer = VARIANTS[variant](named)
    give_gradients(named, 0)
    give_gradients(untouched, 0)
    optimizer.step()
    assert same(gradients(named), gradients(untouched))


def warm_up_then_cosine(optimizer: Lars | Lamb) -> LRScheduler:
    warm_up = LinearLR(optimizer, start_factor=0.25, total_iters=3)
    cosine = CosineAnnealingLR(optimizer, T_max=5)
    return SequentialLR(optimizer, [warm_up, cosine], milestones=[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_variant
def test_a_run_resumes_bit_for_bit(variant: str, dtype: torch.dtype) -> None:
    def build() -> tuple[Named, Lars | Lamb, LRScheduler]:
        named = parameters(dtype=dtype)
        optimizer = VARIANTS[variant](named)
        return named, optimizer, warm_up_then_cosine(optimizer)

    def train(run: tuple[Named, Lars | Lamb, LRScheduler], steps: range) -> None:
        named, optimizer, schedule = run
        for number in steps:
            give_gradients(named, number)
            optimizer.step()
            schedule.step()

    whole, first, second = build(), build(), build()
    train(whole, range(8))
    train(first, range(4))
    file = io.BytesIO()
    torch.save([values(first[0]), first[1].state_dict(), first[2].state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for (_, parameter), value in zip(second[0], saved[0], strict=True):
        parameter.data.copy_(value)
    second[1].load_state_dict(saved[1])
    second[2].load_state_dict(saved[2])
    train(second, range(4, 8))
    assert same(values(second[0]), values(whole[0]))
    assert second[1].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


@every_variant
def test_a_copy_goes_its_own_way(variant: str) -> None:
    named = parameters()
    optimizer = VARIANTS[variant](named)
    moved(optimizer, named, range(2), optimizer.step)
    copied = copy.deepcopy(optimizer)
    before = values(named)
    twins = [
        (name, p) for (name, _), p in zip(named, copied.param_groups[0]["params"], strict=True)
    ]
    moved(copied, twins, range(2, 4), copied.step)
    assert same(values(named), before)
    moved(optimizer, named, range(2, 4), optimizer.step)
    assert same(values(named), values(twins))


@every_variant
def test_a_closure_is_called_once_and_its_loss_returned(variant: str) -> None:
    named, expected = parameters(), parameters()
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append(0)
        give_gradients(named, 0)
        return 0.25

    optimizer, plain = VARIANTS[variant](named), VARIANTS[variant](expected)
    assert optimizer.step(closure) == 0.25
    moved(plain, expected, range(1), plain.step)
    assert calls == [0]
    assert same(values(named), values(expected))


@every_variant
def test_without_gradients_nothing_happens(variant: str) -> None:
    named = parameters()
    optimizer = VARIANTS[variant](named)
    before = values(named)
    assert optimizer.step() is None
    assert same(values(named), before)
    assert not optimizer.state
