"""ReLU and a depthwise convolution, which keep the input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.surroundings import (
    as_in_product,
    differentiates_plainly,
    needs_plain_functions,
)

KernelSize = list[int]
"""One number for each spatial dimension."""
LARGE = 1 << 22
"""Values from which on a batch is computed in parts, on a CPU: torch's two functions write all of
``relu(x)`` to memory and read it again there. Below, computing it twice takes longer."""
PART = 1 << 19
"""Values of a part, or those of one sample: they stay in the caches."""


def relu_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: KernelSize,
    padding: KernelSize,
    dilation: KernelSize,
) -> Tensor:
    """A depthwise convolution of ``relu(x)``; backward computes ``relu(x)`` again.

    Torch keeps ``relu(x)``. Where another layer keeps x anyway, as in the blocks of Xception, this
    keeps one tensor less. Backward writes the gradient of x over that of ``relu(x)``. On a CPU
    large batches are computed some samples at a time, which fit the caches, and batches below four
    million values by torch's functions, which are faster there. So are second derivatives,
    transforms of ``torch.func`` and ``torch.jit.trace``. Autocast casts all three tensors, as it
    does for torch's convolutions.

    Args:
        x: (batch, channels, ...).
        weight: (channels * multiple, 1, ...), as of a convolution with ``groups=channels``.

    Exactness: bitwise `reference`, backward included; in parts, the gradients of ``weight`` and
    ``bias`` are reordered.

    Source: ``fuse_relu_depthwise_conv`` of Paddle.

    Example:
        >>> x, weight = torch.tensor([[[-1.0, 2.0]]]), torch.ones(1, 1, 1)
        >>> relu_depthwise(x, weight, stride=[1], padding=[0], dilation=[1])
        tensor([[[0., 2.]]])
    """
    x, weight = as_in_product(x), as_in_product(weight)
    bias = None if bias is None else as_in_product(bias)
    if is_small(x) or needs_plain_functions():
        return reference(x, weight, bias, stride=stride, padding=padding, dilation=dilation)
    operation: Any = ReluDepthwise
    result: Tensor = operation.apply(x, weight, bias, stride, padding, dilation)
    return result


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: KernelSize,
    padding: KernelSize,
    dilation: KernelSize,
) -> Tensor:
    """The same by torch's functions, one after another."""
    return _convolution(torch.relu(x), weight, bias, stride, padding, dilation)


class ReluDepthwise(torch.autograd.Function):
    """Named for traces."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: KernelSize
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_size, ctx.numbers = None if bias is None else [len(bias)], numbers
        size = _samples(x)
        done = _convolution(torch.relu(x[:size]), weight, bias, *numbers)
        if size >= len(x):
            return done
        result = done.new_empty(len(x), *done.shape[1:])
        result[:size] = done
        for start in range(size, len(x), size):
            part = slice(start, start + size)
            result[part] = _convolution(torch.relu(x[part]), weight, bias, *numbers)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, size = list(ctx.needs_input_grad[:3]), _samples(x)
        if differentiates_plainly(gradient):  # nothing is written in place
            activated = torch.relu(x)
            moved, *sums = _moved(ctx, gradient, activated, weight, wanted)
            dx = None if moved is None else torch.ops.aten.threshold_backward(moved, activated, 0)
            return dx, *sums, None, None, None
        dx = torch.empty_like(x) if wanted[0] and size < len(x) else None
        shared = []
        for start in range(0, max(len(x), 1), size):
            part = slice(start, start + size)
            activated = torch.relu(x[part])
            moved, *sums = _moved(ctx, gradient[part], activated, weight, wanted)
            shared.append(sums)
            if moved is not None:
                into = moved if dx is None else dx[part]
                torch.ops.aten.threshold_backward.grad_input(moved, activated, 0, grad_input=into)
        if len(shared) == 1:
            return moved, *sums, None, None, None
        dweight, dbias = (
            None if parts[0] is None else torch.stack(parts).sum(0)
            for parts in zip(*shared, strict=True)
        )
        return dx, dweight, dbias, None, None, None


def _moved(
    ctx: Any, gradient: Tensor, activated: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    """The wanted gradients of the activated values, the weight and the bias."""
    moved: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        *(gradient, activated, weight, ctx.bias_size, *ctx.numbers),
        *(False, [0] * (activated.ndim - 2), activated.shape[1], wanted),  # not transposed
    )
    return moved


def _samples(x: Tensor) -> int:
    """Choose how many samples are computed at a time."""
    if x.device.type != "cpu" or x.numel() < max(LARGE, 1) or not x.is_contiguous():
        return max(len(x), 1)
    return max(1, PART * len(x) // x.numel())


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: KernelSize,
    padding: KernelSize,
    dilation: KernelSize,
) -> Tensor:
    straight = [0] * (x.ndim - 2)
    return torch.convolution(
        x, weight, bias, stride, padding, dilation, False, straight, x.shape[1]
    )


def is_small(x: Tensor) -> bool:
    """Whether torch's two functions are faster on this tensor."""
    return x.device.type == "cpu" and x.numel() < LARGE
