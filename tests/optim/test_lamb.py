"""LAMB against its equations, and against Adam where the ratio is 1."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.optim import Lamb, lamb
from tests.optim.steps import matrix, one_step
from tests.optim.variants import give_gradients, parameters, same, values

TINY = 1e-12
"""An eps that does not count."""


step_of = partial(one_step, Lamb)


def test_what_is_excluded_moves_as_under_adam() -> None:
    ours, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}
    adapted = Lamb(ours, weight_decay=0.1, exclude=["*"], **settings)
    adam = torch.optim.Adam(theirs, **settings)
    for number in range(6):
        give_gradients(ours, number)
        give_gradients(theirs, number)
        adapted.step()
        adam.step()
    # Adam orders its operations otherwise.
    torch.testing.assert_close(values(ours), values(theirs), rtol=1e-12, atol=1e-12)


def test_the_equation_of_two_steps_in_float64() -> None:
    w = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    parameter = nn.Parameter(w.clone())
    optimizer = Lamb([parameter], lr=0.1, betas=(0.5, 0.75), eps=0.25, weight_decay=0.5)
    m = v = torch.zeros_like(w)
    for step, g in enumerate([torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 0.0]])], start=1):
        parameter.grad = g.double()
        optimizer.step()
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
        d = m / (1 - 0.5**step) / ((v / (1 - 0.75**step)).sqrt() + 0.25) + 0.5 * w
        w = w - 0.1 * w.norm() / d.norm() * d
    torch.testing.assert_close(parameter.detach(), w)
    assert optimizer.state[parameter]["step"] == 2


def test_gradients_are_normalised_by_the_norm_of_all_of_them() -> None:
    dtypes = (torch.float32, torch.float64, torch.float16)
    ours, theirs = ([p for d in dtypes for p in parameters(dtype=d)] for _ in range(2))
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    squares = [p.grad.double().square().sum() for _, p in ours if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt()
    for _, p in theirs:
        if p.grad is not None:
            p.grad /= norm / 0.5
    halves = [{"params": ours[:9]}, {"params": ours[9:]}]
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.5), "eps": 1e-3}
    Lamb(halves, max_grad_norm=0.5, **settings).step()
    Lamb(theirs, **settings).step()
    for (_, p), (_, q) in zip(ours, theirs, strict=True):
        tolerance = 2e-3 if p.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_short_gradients_are_not_made_longer() -> None:
    settings = {"lr": 0.1, "eps": 1e-3}
    one, other = matrix(), matrix()
    assert torch.equal(step_of(one, max_grad_norm=1e3, **settings), step_of(other, **settings))


def test_each_group_has_its_own_limit_on_the_norm_of_all() -> None:
    limited, free, alone = matrix(1), matrix(2), matrix(2)
    before = free.detach().clone()
    groups: list[dict[str, Any]] = [{"params": [limited], "max_grad_norm": 0.1}, {"params": [free]}]
    Lamb(groups, lr=0.1, eps=1e-3).step()
    assert torch.equal(before - free.detach(), step_of(alone, lr=0.1, eps=1e-3))


def test_without_averaging_the_first_moment_is_the_gradient() -> None:
    parameter = matrix()
    optimizer = Lamb([parameter], lr=0.1, grad_averaging=False)
    optimizer.step()
    assert parameter.grad is not None
    assert torch.equal(optimizer.state[parameter]["exp_avg"], parameter.grad)


def test_bias_correction_only_mixes_the_first_steps_differently() -> None:
    settings = {"lr": 0.1, "eps": TINY}
    with_it = step_of(matrix(), weight_decay=0.0, **settings)
    without = step_of(matrix(), weight_decay=0.0, bias_correction=False, **settings)
    torch.testing.assert_close(with_it, without, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(
        step_of(matrix(), weight_decay=1.0, **settings),
        step_of(matrix(), weight_decay=1.0, bias_correction=False, **settings),
        rtol=1e-3,
    )


@pytest.mark.parametrize(("low", "high", "ratio"), [(0, 1, 1.0), (0, 99, 5.0), (7, 9, 7.0)])
def test_the_ratio_is_kept_between_its_bounds(low: float, high: float, ratio: float) -> None:
    parameter = nn.Parameter(torch.full((2, 2), 5.0))
    parameter.grad = torch.ones(2, 2)  # the first direction is 1 everywhere: a ratio of 5
    step = step_of(parameter, lr=0.1, weight_decay=0.0, clip_ratio=(low, high))
    torch.testing.assert_close(step, torch.full((2, 2), 0.1 * ratio))


def test_a_ratio_of_1_for_zeros_is_not_clipped() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    step = step_of(parameter, lr=0.1, clip_ratio=(7, 9))
    torch.testing.assert_close(step, torch.full((2, 2), 0.1))


@pytest.mark.parametrize(("low", "high", "phi"), [(0, 4, 4.0), (0, 99, 10.0), (20, 30, 20.0)])
def test_the_weight_norm_is_kept_between_its_bounds(low: float, high: float, phi: float) -> None:
    parameter = nn.Parameter(torch.full((2, 2), 5.0))
    parameter.grad = torch.ones(2, 2)
    step = step_of(parameter, lr=0.1, weight_decay=0.0, clip_weight_norm=(low, high))
    torch.testing.assert_close(step, torch.full((2, 2), 0.1 * phi / 2))


def test_each_parameter_counts_its_own_steps() -> None:
    def run(step: Any) -> tuple[list[torch.Tensor], list[int]]:
        named = parameters()
        optimizer = Lamb(named, lr=0.1)
        for number in range(6):
            give_gradients(named, number)
            for index, (_, p) in enumerate(named):
                if number % (index + 1):  # the first always has a gradient, others now and then
                    p.grad = None
            step(optimizer)
        return values(named), [optimizer.state[p].get("step", 0) for _, p in named]

    fast, slow = run(lambda optimizer: optimizer.step()), run(lamb.step_one_by_one)
    assert same(fast[0], slow[0])
    assert fast[1] == slow[1] == [6, 3, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_the_fused_form_reads_every_operand_in_one_order(max_grad_norm: float | None) -> None:
    """Gradients and moments in other orders of memory, two sizes of float, one parameter twice."""
    made = []
    for fused in (False, True):
        random = torch.Generator().manual_seed(0)
        both = [nn.Parameter(torch.randn(4, 6, generator=random)) for _ in range(3)]
        both[2].data = both[2].data.double()
        optimizer = Lamb(both, lr=0.1, max_grad_norm=max_grad_norm)
        optimizer.fused = fused
        for number in range(4):
            for p in both:
                gradient = torch.randn(6, 4, generator=random).to(p.dtype).t()
                p.grad = gradient if number % 2 else gradient[:1].expand(4, 6)
            if number == 2:
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
            optimizer.step()
        made.append(both)
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-5)


def test_the_fused_form_leaves_types_that_differ_to_torch() -> None:
    made = []
    for fused in (False, True):
        p = nn.Parameter(torch.ones(4, 6))
        optimizer = Lamb([p], lr=0.1)
        optimizer.fused = fused
        for _ in range(2):
            p.grad = torch.arange(24.0).view(4, 6).to(p.dtype)
            optimizer.step()
            p.grad, p.data = None, p.data.double()  # the moments stay as they are
        made.append(p)
    torch.testing.assert_close(made[1], made[0])
