"""Attention in windows against torch's functions, by every path that runs here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.kernels import window_attention
from slipstream.kernels.window_attention import reference
from tests.kernels.attention_cases import CASES, IN_KERNEL, inputs

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_those_of_the_reference(case: str, dtype: torch.dtype) -> None:
    (*given, mask), gradient = inputs(case, dtype)
    tolerance = TOLERANCE[dtype]
    results = []
    for function in (window_attention, reference):
        result = function(*given, mask)
        results.append((result, *torch.autograd.grad(result, given, gradient)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)


def test_masked_positions_leave_no_denormal_numbers() -> None:
    """Processors take many times as long for them; a row that is masked whole stays as it is."""
    (query, key, value, bias, mask), _ = inputs("masks", torch.float32)
    assert mask is not None
    mask[0, 0] = -100.0
    result = window_attention(query, key, value, bias, mask)
    kept = [t for t in result.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    smallest = torch.finfo(torch.float32).tiny
    chances = max((t for t in kept if t.shape[1:] == mask.shape[1:]), key=len)
    assert not ((chances > 0) & (chances < smallest)).any()
    assert (chances == 0).any()
    torch.testing.assert_close(chances.sum(-1), torch.ones(chances.shape[:2]))
    torch.testing.assert_close(result, reference(query, key, value, bias, mask))


def test_gradcheck() -> None:
    (*given, mask), _ = inputs("masks", torch.float64)
    small: list[Tensor] = [t.detach()[:2, :1, :3].clone().requires_grad_() for t in given[:3]]
    bias = given[3].detach()[:1, :3, :3].clone().requires_grad_()
    assert mask is not None
    few = mask[:, :3, :3]
    assert torch.autograd.gradcheck(lambda *a: window_attention(*a, few), (*small, bias))


def test_dropout_keeps_the_mean() -> None:
    (q, k, v, bias, _), gradient = inputs("plain", torch.float64)
    torch.manual_seed(0)
    runs = [window_attention(q, k, v, bias, dropout=0.3) for _ in range(400)]
    expected = reference(q, k, v, bias)
    error = (torch.stack(runs).mean(0) - expected).abs().mean() / expected.abs().mean()
    assert not runs[0].equal(runs[1])
    assert error < 0.1
    torch.autograd.grad(runs[0], (q, k, v, bias), gradient)


def test_dropout_s_gradient_is_that_of_what_was_kept() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(3)
        return window_attention(q, k, v, bias, dropout=0.4)

    shape = (2, 1, 4, 3)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (*given, bias))


def test_heads_of_a_position_lie_side_by_side() -> None:
    (q, k, v, bias, _), _ = inputs("plain", torch.float32)
    assert window_attention(q, k, v, bias).transpose(1, 2).is_contiguous()


def test_what_does_not_fit_is_refused() -> None:
    q = torch.zeros(6, 2, 9, 4)
    bias = torch.zeros(2, 9, 9)
    with pytest.raises(UsageError, match="allowed: one shape"):
        window_attention(q, q[:, :1], q, bias)
    with pytest.raises(UsageError, match=r"bias has the shape \(9, 9\)"):
        window_attention(q, q, q, bias[0])
    with pytest.raises(UsageError, match="divides 6 windows"):
        window_attention(q, q, q, bias, torch.zeros(4, 9, 9))
    with pytest.raises(UsageError, match="dropout is 1"):
        window_attention(q, q, q, bias, dropout=1)


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_of_triton_under_its_interpreter() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}:{root / 'src'}"},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*IN_KERNEL, "dropout", "second derivatives"]
