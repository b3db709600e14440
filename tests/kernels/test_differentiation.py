"""Derivatives of kernels by each way of torch: twice, by ``torch.func``, traced, of some inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import (
    add_act,
    batch_norm_act,
    compress_by_index,
    relu_depthwise,
    window_attention,
    window_merge,
    window_partition,
)
from slipstream.kernels.activations import ACTIVATIONS, ActivationName
from slipstream.kernels.add_act import reference as plain_sum
from slipstream.kernels.batch_norm_act import reference as plain_norm
from slipstream.kernels.compress_by_index import reference as plain_rows
from slipstream.kernels.relu_depthwise import reference as plain_depthwise
from slipstream.kernels.window_attention import reference as plain_attention
from slipstream.kernels.window_partition import reference_merge, reference_partition

Function = Callable[..., Tensor]
SHAPE = {"stride": [1, 2], "padding": [1, 0], "dilation": [1, 1]}
INDEX = torch.tensor([1, 0, 1])
MASK = torch.where(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)) > 1, -100.0, 0)
KERNELS: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "window_attention": (
        lambda *given: window_attention(*given, MASK.to(given[0].dtype)),
        lambda *given: plain_attention(*given, MASK.to(given[0].dtype)),
        [(4, 2, 4, 3)] * 3 + [(2, 4, 4)],
    ),
    "window_partition": (
        lambda maps: window_partition(maps, 3, 1),
        lambda maps: reference_partition(maps, 3, 1),
        [(2, 4, 5, 2)],
    ),
    "window_merge": (
        lambda windows: window_merge(windows, 3, (4, 5), 1),
        lambda windows: reference_merge(windows, 3, (4, 5), 1),
        [(8, 3, 3, 2)],
    ),
    "relu_depthwise": (
        lambda *given: relu_depthwise(*given, **SHAPE),
        lambda *given: plain_depthwise(*given, **SHAPE),
        [(3, 2, 4, 5), (4, 1, 3, 2), (4,)],
    ),
    "add_act": (
        lambda left, right: add_act(left, right, "tanh"),
        lambda left, right: plain_sum(left, right, "tanh"),
        [(3, 5)] * 2,
    ),
    "batch_norm_act": (
        lambda x, weight, bias, residual: (
            batch_norm_act(x, weight, bias, "sigmoid", residual=residual).values
        ),
        lambda x, weight, bias, residual: (
            plain_norm(x, weight, bias, "sigmoid", residual=residual).values
        ),
        [(4, 3, 5), (3,), (3,), (4, 3, 5)],
    ),
    "compress_by_index": (
        lambda values: compress_by_index(values, INDEX),
        lambda values: plain_rows(values, INDEX),
        [(3, 2, 4)],
    ),
}
all_kernels = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(autouse=True)
def _kernels_at_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors take the kernels, too, in parts and uncompiled."""
    for function, limits in (
        (add_act, {"SMALL": 0}),
        (batch_norm_act, {"is_small": lambda x: False}),
        (relu_depthwise, {"LARGE": 0, "PART": 40}),
    ):
        for limit, value in limits.items():
            monkeypatch.setitem(function.__globals__, limit, value)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def drawn(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@all_kernels
def test_second_derivatives(name: str) -> None:
    kernel, plain, shapes = KERNELS[name]
    inputs = drawn(shapes)
    assert torch.autograd.gradgradcheck(kernel, inputs)
    assert_alike(kernel, plain, gradient_penalty, inputs)


def gradient_penalty(function: Function, *inputs: Tensor) -> list[Tensor]:
    """Its gradients; a second backward through the same graph gives the same."""
    result = function(*inputs).square().sum()
    first = torch.autograd.grad(result, inputs, create_graph=True)
    penalty = torch.stack([g.square().sum() for g in first]).sum() + result
    again = torch.autograd.grad(penalty, inputs, retain_graph=True)
    twice = torch.autograd.grad(penalty, inputs)
    assert all(a.equal(b) for a, b in zip(again, twice, strict=True))
    return [*twice]


def assert_alike(kernel: Function, plain: Function, run: Any, inputs: list[Tensor]) -> None:
    for ours, theirs in zip(run(kernel, *inputs), run(plain, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_second_derivatives_of_every_activation(
    activation: ActivationName, with_residual: bool
) -> None:
    x, weight, bias, residual = drawn([(6, 3), (3,), (3,), (6, 3)])

    def norm(*given: Tensor) -> Tensor:
        *rest, last = given
        residual = last if with_residual else None
        return batch_norm_act(*rest, activation, residual=residual).values + 0 * last

    assert torch.autograd.gradgradcheck(norm, (x, weight, bias, residual))
    assert torch.autograd.gradgradcheck(lambda a, b: add_act(a, b, activation), (x, residual))


@all_kernels
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev", "hessian"])
def test_transforms_of_torch_func(name: str, transform: str) -> None:
    kernel, plain, shapes = KERNELS[name]
    inputs = [t.detach() for t in drawn(shapes)]
    assert_alike(kernel, plain, TRANSFORMS[transform], inputs)


def by_vjp(function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
    result, back = torch.func.vjp(function, *inputs)
    return back(torch.cos(result))  # type: ignore[no-any-return]


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, *given: torch.func.grad(
        lambda *a: f(*a).square().sum(), argnums=tuple(range(len(given)))
    )(*given),
    "vjp": by_vjp,
    "jvp": lambda f, *given: torch.func.jvp(f, given, tuple(map(torch.cos, given))),
    "vmap": lambda f, *given: (torch.vmap(f)(*(torch.stack([t, t.sin()]) for t in given)),),
    "jacrev": lambda f, *given: torch.func.jacrev(f, argnums=0)(*given),
    "hessian": lambda f, *given: torch.func.hessian(lambda *a: f(*a).square().sum())(*given),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@all_kernels
def test_traced_they_are_torch_s_functions(name: str) -> None:
    kernel, plain, shapes = KERNELS[name]
    inputs = drawn(shapes)
    traced = torch.jit.trace(kernel, inputs, check_trace=False)  # type: ignore[no-untyped-call]
    assert "PythonOp" not in str(traced.graph)
    others = [t.detach().cos().requires_grad_() for t in inputs]
    assert_alike(traced, plain, lambda f, *given: [f(*given)], others)


@all_kernels
def test_gradients_of_some_operands(name: str) -> None:
    kernel, plain, shapes = KERNELS[name]
    inputs = drawn(shapes)
    for one in range(len(inputs)):
        given = [t.detach().requires_grad_(i == one) for i, t in enumerate(inputs)]

        def run(function: Function, *given: Tensor, one: int = one) -> list[Tensor]:
            result = function(*given)
            return [result, *torch.autograd.grad(result.square().sum(), given[one])]

        assert_alike(kernel, plain, run, given)


@all_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with_them(name: str, mode: Any) -> None:
    kernel, plain, shapes = KERNELS[name]
    inputs = drawn(shapes)
    with mode():
        assert not kernel(*inputs).requires_grad
    assert_alike(kernel, plain, gradient_penalty, inputs)


@all_kernels
def test_orders_of_memory(name: str) -> None:
    """Operands whose axes lie reversed, and a gradient that is expanded."""
    kernel, plain, shapes = KERNELS[name]
    inputs = [t.detach().mT.contiguous().mT if t.ndim > 1 else t for t in drawn(shapes)]
    learning = [t.detach().requires_grad_() for t in inputs]

    def run(function: Function, *given: Tensor) -> list[Tensor]:
        result = function(*given)
        return [result, *torch.autograd.grad(result.sum(), given)]

    assert_alike(kernel, plain, run, learning)


@all_kernels
def test_no_samples(name: str) -> None:
    kernel, plain, shapes = KERNELS[name]
    if name in ("batch_norm_act", "compress_by_index"):
        pytest.skip("a batch norm of nothing is refused by torch; an index has a fixed length")
    inputs = drawn(shapes)
    batched = {"relu_depthwise": 1, "window_attention": 3}.get(name, len(inputs))
    given = [t.detach()[:0].requires_grad_() if i < batched else t for i, t in enumerate(inputs)]

    def run(function: Function, *given: Tensor) -> list[Tensor]:
        result = function(*given)
        return [result, *torch.autograd.grad(result.sum(), given)]

    assert_alike(kernel, plain, run, given)
