"""LARS against its equations, and against SGD where the ratio is 1."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from slipstream.optim import Lars
from tests.optim.steps import matrix, one_step
from tests.optim.variants import give_gradients, parameters, same, values

step_of = partial(one_step, Lars)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_what_is_excluded_moves_as_under_sgd_bit_for_bit(momentum: float, nesterov: bool) -> None:
    ours, theirs = parameters(), parameters()
    lars = Lars(ours, lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.1, exclude=["*"])
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, nesterov=nesterov, foreach=False)
    for number in range(4):
        give_gradients(ours, number)
        give_gradients(theirs, number)
        lars.step()
        sgd.step()
    assert same(values(ours), values(theirs))


@given(st.integers(0, 99), st.integers(-20, 20))
def test_the_length_of_a_gradient_does_not_matter(seed: int, exponent: int) -> None:
    one, other = matrix(seed), matrix(seed, gradient_scale=2.0**exponent)
    settings = {"lr": 1.0, "trust_coefficient": 0.1, "eps": 0.0}
    assert torch.equal(step_of(one, **settings), step_of(other, **settings))


def test_the_equation_with_decay_in_float64() -> None:
    parameter = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    parameter.grad = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    step = step_of(parameter, lr=2.0, weight_decay=0.1, trust_coefficient=0.01, eps=0.5)
    ratio = 0.01 * 5 / (1 + 0.1 * 5 + 0.5)
    expected = 2.0 * ratio * torch.tensor([[1.3, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(step, expected)


def test_the_rate_in_the_velocity_matters_only_where_it_changes() -> None:
    outside, inside = [matrix()], [matrix()]
    settings: dict[str, Any] = {"trust_coefficient": 0.1, "momentum": 0.5, "eps": 0.0}
    plain = Lars(outside, lr=1.0, **settings)
    paper = Lars(inside, lr=1.0, lr_in_velocity=True, **settings)
    for _ in range(3):
        plain.step()
        paper.step()
    torch.testing.assert_close(outside[0], inside[0], rtol=1e-6, atol=1e-6)
    gathered = plain.state[outside[0]]["momentum_buffer"].clone()
    before = values([("", outside[0]), ("", inside[0])])
    for optimizer in (plain, paper):
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.step()
    # The paper's velocity was gathered at a rate of 1, torch's is taken at 0.25.
    difference = (before[1] - inside[0]) - (before[0] - outside[0])
    torch.testing.assert_close(difference, 0.75 * 0.5 * gathered, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("lr", "rate"), [(10.0, 0.02), (0.02, 0.02), (0.005, 0.005), (0.0, 0.0)])
@pytest.mark.parametrize("lr_in_velocity", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_larc_takes_the_smaller_rate(
    lr: float, rate: float, lr_in_velocity: bool, as_tensor: bool
) -> None:
    parameter = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    parameter.grad = torch.tensor([[4.0, 3.0]])
    step = step_of(
        parameter, lr=torch.tensor(lr) if as_tensor else lr, trust_coefficient=0.02, clip=True,
        lr_in_velocity=lr_in_velocity, eps=0.0,
    )  # fmt: skip
    torch.testing.assert_close(step, rate * torch.tensor([[4.0, 3.0]]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [False, True])
def test_a_layer_of_zeros_gets_off_the_ground(clip: bool) -> None:
    parameter = matrix(scale=0.0)
    step = step_of(parameter, lr=0.5, clip=clip)
    assert parameter.grad is not None
    assert torch.equal(step, 0.5 * parameter.grad)


def test_a_gradient_of_zeros_leaves_decay_alone() -> None:
    parameter = matrix(gradient_scale=0.0)
    before = parameter.detach().clone()
    step = step_of(parameter, lr=0.5, weight_decay=0.125, eps=0.0)
    torch.testing.assert_close(step, 0.0625 * before)


def test_vectors_stand_aside_unless_asked() -> None:
    vector = nn.Parameter(torch.tensor([3.0, 4.0]))
    vector.grad = torch.tensor([1.0, 0.0])
    plain = step_of(vector, lr=0.5, weight_decay=0.5)
    assert torch.equal(plain, torch.tensor([0.5, 0.0]))
    vector = nn.Parameter(torch.tensor([3.0, 4.0]))
    vector.grad = torch.tensor([1.0, 0.0])
    adapted = step_of(vector, lr=0.5, trust_coefficient=0.1, eps=0.0, adapt_vectors=True)
    torch.testing.assert_close(adapted, torch.tensor([0.25, 0.0]))
