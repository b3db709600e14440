"""Kernels under autocast, around forward, backward or both, and operands of several types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.kernels import add_act, batch_norm_act, relu_depthwise, window_attention
from slipstream.kernels.batch_norm_act import reference as plain_norm
from slipstream.kernels.window_attention import reference as plain_attention

TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 6e-3}
half_types = pytest.mark.parametrize("half", TOLERANCE)
Run = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _kernels_at_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(add_act.__globals__, "SMALL", 0)
    monkeypatch.setitem(batch_norm_act.__globals__, "is_small", lambda x: False)
    monkeypatch.setitem(relu_depthwise.__globals__, "LARGE", 0)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def results(
    run: Run, inputs: list[Tensor], half: torch.dtype, *, backward: bool, forward: bool = True
) -> list[Tensor]:
    """The output and gradients, with autocast around forward, backward or both."""
    with torch.autocast("cpu", half) if forward else nullcontext():
        output = run(*inputs)
    gradient = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    with torch.autocast("cpu", half) if backward else nullcontext():
        return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def assert_near(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))


CASES: dict[str, tuple[Run, Run, list[tuple[int, ...]]]] = {
    "window_attention": (window_attention, plain_attention, [(4, 2, 9, 8)] * 3 + [(2, 9, 9)]),
    "relu_depthwise": (
        lambda *given: relu_depthwise(*given, stride=[1, 2], padding=[1, 0], dilation=[1, 1]),
        lambda x, w, b: torch.conv2d(x.relu(), w, b, (1, 2), (1, 0), 1, 4),
        [(3, 4, 6, 5), (4, 1, 3, 2), (4,)],
    ),
    "batch_norm_act": (
        lambda *given: batch_norm_act(*given, "silu").values,
        lambda *given: plain_norm(*given, "silu").values,
        [(4, 3, 5), (3,), (3,)],
    ),
}


@half_types
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_as_torch_s_functions_under_autocast(name: str, backward: bool, half: torch.dtype) -> None:
    kernel, plain, shapes = CASES[name]
    inputs = drawn(*shapes)
    ours, theirs = (results(run, inputs, half, backward=backward) for run in (kernel, plain))
    assert_near(ours, theirs, TOLERANCE[half])


@half_types
@pytest.mark.parametrize("name", CASES)
def test_backward_computes_in_the_types_of_forward(name: str, half: torch.dtype) -> None:
    """Autocast around backward alone changes nothing."""
    kernel, plain, shapes = CASES[name]
    inputs = drawn(*shapes)
    ours = results(kernel, inputs, half, backward=True, forward=False)
    theirs = results(plain, inputs, half, backward=False, forward=False)
    assert_near(ours, theirs, 1e-5)


@half_types
def test_bias_and_mask_of_other_types(half: torch.dtype) -> None:
    query, key, value, bias = drawn(*[(4, 2, 9, 8)] * 3, (2, 9, 9))
    mask = torch.where(torch.randn(2, 9, 9) > 1, -100.0, 0.0)
    halves = [t.detach().to(half).requires_grad_() for t in (query, key, value)]
    expected = plain_attention(query, key, value, bias, mask)
    for other in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        added = bias.detach().to(other).requires_grad_()
        result = window_attention(*halves, added, mask.to(other))
        gradient = torch.autograd.grad(result.float().square().sum(), added)[0]
        assert (result.dtype, gradient.dtype) == (half, other)
        torch.testing.assert_close(result.float(), expected, rtol=0, atol=0.1)


def test_fp64_stays_under_autocast() -> None:
    inputs = [t.detach().double().requires_grad_() for t in drawn(*[(4, 2, 9, 8)] * 3, (2, 9, 9))]
    with torch.autocast("cpu", torch.bfloat16):
        result = window_attention(*inputs)
    torch.testing.assert_close(result, plain_attention(*inputs), rtol=1e-10, atol=1e-10)


def test_types_that_do_not_fit_are_refused() -> None:
    query, key, value, bias = drawn(*[(4, 2, 9, 8)] * 3, (2, 9, 9))
    with pytest.raises(UsageError, match=r"float32 on cpu, torch.float64 on cpu.*one floating"):
        window_attention(query, key.double(), value, bias)
    with pytest.raises(UsageError, match=r"mask is torch.bool on cpu.*torch.where\(mask, 0.0"):
        window_attention(query, key, value, bias, torch.ones(2, 9, 9, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"mask requires a gradient.*mask.detach\(\)"):
        window_attention(query, key, value, bias, torch.ones(2, 9, 9, requires_grad=True))
    elsewhere = torch.zeros(2, 9, 9, device="meta")
    with pytest.raises(UsageError, match=r"bias is torch.float32 on meta"):
        window_attention(query, key, value, elsewhere)
