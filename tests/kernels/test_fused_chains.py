"""Sums, batch norms and convolutions with an activation: each beside its plain reference.

The equations run uncompiled over all activations, shapes and dtypes; a few compiled ones stand for
the rest, as a compilation takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from slipstream.kernels.activations import ACTIVATIONS, ActivationName
from slipstream.kernels.add_act import SMALL, AddAct, add_act, reference as plain_sum
from slipstream.kernels.batch_norm_act import (
    BatchNormAct,
    batch_norm_act,
    reference as plain_norm,
)
from slipstream.kernels.relu_depthwise import reference as plain_depthwise, relu_depthwise

NAMES: tuple[ActivationName, ...] = get_args(ActivationName)
SHAPES = {"rows": (6, 5), "lines": (3, 5, 7), "maps": (3, 5, 4, 3), "volumes": (2, 3, 2, 3, 2)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
ADD: Any = AddAct
NORM: Any = BatchNormAct

all_activations = pytest.mark.parametrize("activation", NAMES)
all_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
all_types = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (2 * torch.randn(shape)).to(dtype).requires_grad_()


def assert_same(fused: Any, plain: Any, inputs: list[Tensor | None], tolerance: float) -> None:
    """Results and gradients, under one random gradient."""
    learning = [x for x in inputs if x is not None and x.requires_grad]
    gradient = torch.randn_like(plain)
    expected = [plain, *torch.autograd.grad(plain, learning, gradient)]
    for now, then in zip(
        [fused, *torch.autograd.grad(fused, learning, gradient)], expected, strict=True
    ):
        torch.testing.assert_close(
            now, then, rtol=tolerance, atol=tolerance * float(then.detach().abs().max())
        )


def kept_bytes(result: Tensor) -> int:
    """What a node of the graph keeps for backward."""
    return sum(t.nbytes for t in result.grad_fn.saved_tensors if t is not None)  # type: ignore[union-attr]


@pytest.mark.usefixtures("eager")
class TestEquations:
    @all_activations
    def test_gradients_of_sums(self, activation: ActivationName) -> None:
        inputs = drawn(3, 5), drawn(3, 5)
        assert gradcheck(lambda *terms: ADD.apply(*terms, activation), inputs)

    @all_activations
    @pytest.mark.parametrize("residual", [False, True])
    def test_gradients_of_batch_norms(self, activation: ActivationName, residual: bool) -> None:
        inputs = drawn(4, 3, 5), drawn(3), drawn(3), drawn(4, 3, 5) if residual else None
        assert gradcheck(lambda *given: NORM.apply(*given, activation, 1e-5, None)[0], inputs)

    @all_activations
    @all_types
    def test_sums_equal_the_reference(self, activation: ActivationName, dtype: torch.dtype) -> None:
        inputs = [drawn(4, 9, dtype=dtype), drawn(4, 9, dtype=dtype)]
        fused, plain = ADD.apply(*inputs, activation), plain_sum(*inputs, activation)
        assert_same(fused, plain, [*inputs], TOLERANCE[dtype])

    @all_shapes
    @all_types
    @pytest.mark.parametrize("residual", [False, True])
    def test_batch_norms_of_all_shapes(
        self, shape: Any, dtype: torch.dtype, residual: bool
    ) -> None:
        self.check_batch_norm("relu", shape, dtype, residual)

    @all_activations
    @all_types
    @pytest.mark.parametrize("residual", [False, True])
    def test_batch_norms_with_all_activations(
        self, activation: ActivationName, dtype: torch.dtype, residual: bool
    ) -> None:
        self.check_batch_norm(activation, SHAPES["maps"], dtype, residual)

    def check_batch_norm(
        self, activation: ActivationName, shape: Any, dtype: torch.dtype, residual: bool
    ) -> None:
        x, other = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype) if residual else None
        wide = dtype if dtype == torch.float64 else torch.float32  # as autocast leaves them
        weight, bias = drawn(shape[1], dtype=wide), drawn(shape[1], dtype=wide)
        if other is not None:
            # A sum that 16 bits round to 6 is flat to relu6, and just below 6 it is not.
            with torch.no_grad():
                total = F.batch_norm(x.to(wide), None, None, weight, bias, training=True) + other
                other += ((total - 6).abs() < 0.2).to(dtype)
        fused = NORM.apply(x, weight, bias, other, activation, 1e-5, None)
        # 16 bits are rounded once, by torch after each operation: fp32 is the reference
        given = [t if t is None else t.to(wide).detach().requires_grad_() for t in (x, other)]
        plain = plain_norm(given[0], weight, bias, activation, residual=given[1])  # type: ignore[arg-type]
        for statistic, expected in zip(fused[1:], plain[1:], strict=True):
            torch.testing.assert_close(statistic, expected, check_dtype=True)
        assert fused[0].dtype == dtype
        gradient = torch.randn(shape, dtype=wide).to(dtype)
        inputs = [t for t in (x, weight, bias, other) if t is not None]
        wides = [t for t in (given[0], weight, bias, given[1]) if t is not None]
        now = [fused[0], *torch.autograd.grad(fused[0], inputs, gradient)]
        then = [plain[0], *torch.autograd.grad(plain[0], wides, gradient.to(wide))]
        for one, two in zip(now, then, strict=True):
            size = max(float(two.detach().abs().max()), 1e-3)
            tolerance = 5 * TOLERANCE[dtype]
            torch.testing.assert_close(one.to(wide), two, rtol=tolerance, atol=tolerance * size)

    @pytest.mark.parametrize("weight", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    def test_without_weight_or_bias(self, weight: bool, bias: bool) -> None:
        x, given = drawn(4, 3, 2, 2), [drawn(3) if w else None for w in (weight, bias)]
        fused, plain = (
            NORM.apply(x, *given, None, "relu", 1e-5, None)[0],
            plain_norm(x, *given, "relu").values,
        )
        assert_same(fused, plain, [x, *given], 1e-12)

    @pytest.mark.parametrize(("batch", "first", "others"), [
        (16, 1000.0, 1000.0),  # far from zero
        (64, 100.0, 0.0),  # a first sample far from all others
        (16, 3.0, 3.0),
        (1, 7.0, 0.0),
    ])  # fmt: skip
    def test_statistics_far_from_zero(self, batch: int, first: float, others: float) -> None:
        x = torch.randn(batch, 4, 5, 7)
        x[0] += first
        x[1:] += others
        fused = NORM.apply(x, None, None, None, "relu", 1e-5, None)
        variance, mean = torch.var_mean(x.double(), [0, 2, 3], correction=0)
        deviation = float(variance.max().sqrt())
        torch.testing.assert_close(fused[1].double(), mean, rtol=1e-6, atol=1e-5 * deviation)
        torch.testing.assert_close(fused[2].double(), variance, rtol=1e-5 * batch**0.5, atol=0)

    def test_values_that_do_not_differ_have_no_variance(self) -> None:
        x = torch.full((6, 3, 5, 5), 1 / 3)
        values, mean, variance = NORM.apply(x, None, None, None, "sigmoid", 1e-5, None)
        assert variance.max() < 1e-12
        assert variance.min() >= 0
        torch.testing.assert_close(mean, x[0, :, 0, 0])
        torch.testing.assert_close(values, torch.full_like(x, 0.5))

    def test_frozen_parameters_get_no_gradient(self) -> None:
        x, weight, bias = drawn(4, 3), drawn(3).detach(), drawn(3).detach()
        NORM.apply(x, weight, bias, x.detach(), "silu", 1e-5, None)[0].sum().backward()
        assert [t.grad is not None for t in (x, weight, bias)] == [True, False, False]

    @pytest.mark.parametrize(("activation", "residual", "kept"), [
        ("relu", True, 2), ("relu6", False, 1), ("silu", False, 1), ("gelu", True, 2),
    ])  # fmt: skip
    def test_nothing_between_is_kept(
        self, activation: ActivationName, residual: bool, kept: int
    ) -> None:
        """x, and the result or the residual; torch also keeps what the activation is given."""
        x, weight, bias = drawn(8, 4, 16, 16), drawn(4), drawn(4)
        other = drawn(8, 4, 16, 16) if residual else None
        result = NORM.apply(x, weight, bias, other, activation, 1e-5, None)[0]
        assert kept_bytes(result) == kept * x.nbytes + 4 * 4 * x.itemsize


@pytest.mark.process  # a compiler
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_compiled_batch_norms(order: torch.memory_format) -> None:
    """Two sizes, in both orders of memory, with one compilation each."""
    torch.manual_seed(0)  # of two million values one may be so near 0 that relu sees either sign
    weight, bias = drawn(16, dtype=torch.float32), drawn(16, dtype=torch.float32)
    for side in (48, 46):
        x, other = (
            drawn(16, 16, side, side, dtype=torch.float32)
            .detach()
            .to(memory_format=order)
            .requires_grad_()
            for _ in range(2)
        )
        fused = batch_norm_act(x, weight, bias, "relu", residual=other)
        assert "BatchNormAct" in type(fused.values.grad_fn).__name__
        plain = plain_norm(x, weight, bias, "relu", residual=other)
        torch.testing.assert_close(fused.mean, plain.mean)
        torch.testing.assert_close(fused.variance, plain.variance)
        assert_same(fused.values, plain.values, [x, weight, bias, other], 2e-5)


@pytest.mark.process  # a compiler
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_compiled_sums(activation: ActivationName) -> None:
    left, right = (drawn(9, SMALL // 8, dtype=torch.float32) for _ in range(2))
    fused, plain = add_act(left, right, activation), plain_sum(left, right, activation)
    assert "AddAct" in type(fused.grad_fn).__name__
    assert activation != "relu" or fused.equal(plain)
    assert_same(fused, plain, [left, right], 2e-6)


def test_small_and_mixed_operands_are_added_by_torch() -> None:
    for left, right in (
        (torch.ones(3), torch.ones(3)),
        (torch.ones(2, SMALL), torch.ones(SMALL)),
        (torch.ones(SMALL), torch.ones(SMALL, dtype=torch.float64)),
    ):
        found = add_act(left.requires_grad_(), right, "relu")
        assert "Relu" in type(found.grad_fn).__name__
        assert found.equal(torch.relu(left + right))


def parts(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    """Batches of every size are large, and computed in parts of so many values."""
    monkeypatch.setitem(relu_depthwise.__globals__, "LARGE", 0)
    monkeypatch.setitem(relu_depthwise.__globals__, "PART", values)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_depthwise_convolutions_are_bitwise(
    monkeypatch: pytest.MonkeyPatch, dims: int, multiple: int, bias: bool
) -> None:
    parts(monkeypatch, 10**6)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    for stride, padding, dilation in ((1, 1, 1), (2, 0, 1), (1, 2, 2)):
        layer = kind(4, 4 * multiple, 3, stride, padding, dilation, groups=4, bias=bias)
        numbers: Any = {
            name: list(getattr(layer, name)) for name in ("stride", "padding", "dilation")
        }
        x = drawn(2, 4, *[9] * dims, dtype=torch.float32)
        fused, plain = (
            run(x, layer.weight, layer.bias, **numbers) for run in (relu_depthwise, plain_depthwise)
        )
        gradient = torch.randn_like(plain)
        inputs = [x, *layer.parameters()]
        found = torch.autograd.grad(fused, inputs, gradient)
        expected = torch.autograd.grad(plain, inputs, gradient)
        assert fused.equal(plain)
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("learns", [True, False], ids=["x learns", "x does not"])
def test_large_batches_of_depthwise_convolutions_are_computed_in_parts(
    monkeypatch: pytest.MonkeyPatch, samples: int, learns: bool
) -> None:
    parts(monkeypatch, samples * 4 * 81)
    x, layer = drawn(5, 4, 9, 9, dtype=torch.float32), nn.Conv2d(4, 8, 3, groups=4)
    x.requires_grad_(learns)
    numbers: Any = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    with torch.profiler.profile() as profiled:
        fused = relu_depthwise(x, layer.weight, layer.bias, **numbers)
    plain = plain_depthwise(x, layer.weight, layer.bias, **numbers)
    convolutions = [e for e in profiled.events() if e.name == "aten::convolution"]
    assert len(convolutions) == -(-5 // samples)
    assert fused.equal(plain)
    assert_same(fused, plain, [x, layer.weight, layer.bias], 1e-5)


@pytest.mark.parametrize("large", [True, False])
def test_depthwise_convolutions_of_large_batches_keep_the_input_itself(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        parts(monkeypatch, 10**6)
    x, layer = drawn(2, 4, 9, 9, dtype=torch.float32), nn.Conv2d(4, 4, 3, groups=4, bias=False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        relu_depthwise(x, layer.weight, stride=[1, 1], padding=[0, 0], dilation=[1, 1])
    assert layer.weight.data_ptr() in {t.data_ptr() for t in kept}
    assert (x.data_ptr() in {t.data_ptr() for t in kept}) == large


def test_every_activation_says_what_its_derivative_needs() -> None:
    assert set(ACTIVATIONS) == set(NAMES)
    for act in ACTIVATIONS.values():
        z = drawn(50)
        result = act.forward(z)
        (expected,) = torch.autograd.grad(result, z, torch.ones_like(result))
        kept = result.detach() if act.keeps_output else z.detach()
        torch.testing.assert_close(act.backward(torch.ones(50).double(), kept), expected)
