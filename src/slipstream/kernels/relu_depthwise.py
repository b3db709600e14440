"""ReLU and a depthwise convolution, which keep the input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Size = list[int]
"""One number for each spatial dimension."""


def relu_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size,
    padding: Size,
    dilation: Size,
) -> Tensor:
    """A depthwise convolution of ``relu(x)``; backward computes ``relu(x)`` again.

    Torch keeps ``relu(x)``. Where another layer keeps x anyway, as in the blocks of Xception, this
    keeps one tensor less, and costs one more pass over x.

    Args:
        x: (batch, channels, ...).
        weight: (channels * multiple, 1, ...), as of a convolution with ``groups=channels``.

    Exactness: bitwise `reference`, backward included.

    Source: ``fuse_relu_depthwise_conv`` of Paddle.

    Example:
        >>> x, weight = torch.tensor([[[-1.0, 2.0]]]), torch.ones(1, 1, 1)
        >>> relu_depthwise(x, weight, stride=[1], padding=[0], dilation=[1])
        tensor([[[0., 2.]]])
    """
    operation: Any = ReluDepthwise
    result: Tensor = operation.apply(x, weight, bias, stride, padding, dilation)
    return result


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size,
    padding: Size,
    dilation: Size,
) -> Tensor:
    """The same by torch's functions, one after another."""
    return _convolution(torch.relu(x), weight, bias, stride, padding, dilation)


class ReluDepthwise(torch.autograd.Function):
    """Named for traces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Size) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_size, ctx.numbers = None if bias is None else [len(bias)], numbers
        return _convolution(torch.relu(x), weight, bias, *numbers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        activated = torch.relu(x)
        straight = [0] * (x.ndim - 2)  # no transposed convolution
        wanted = list(ctx.needs_input_grad[:3])
        dx, dweight, dbias = torch.ops.aten.convolution_backward(
            *(gradient, activated, weight, ctx.bias_size, *ctx.numbers),
            *(False, straight, x.shape[1], wanted),
        )
        if dx is not None:
            dx = torch.ops.aten.threshold_backward(dx, activated, 0)
        return dx, dweight, dbias, None, None, None


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Size, padding: Size, dilation: Size
) -> Tensor:
    straight = [0] * (x.ndim - 2)
    return torch.convolution(
        x, weight, bias, stride, padding, dilation, False, straight, x.shape[1]
    )
