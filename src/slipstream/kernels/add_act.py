"""The sum of two tensors and an activation, in one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.activations import ACTIVATIONS, ActivationName
from slipstream.kernels.compiled import SMALL, compiled


def add_act(
    left: Tensor, right: Tensor, activation: ActivationName, *, in_place: bool = False
) -> Tensor:
    """``activation(left + right)`` in one kernel; backward is one kernel, too.

    The sum is not kept for activations whose derivative follows from their result.

    Args:
        left, right: of one shape and one floating type; others, and small ones, are computed by
            torch's two functions.
        in_place: ``left`` may be changed, and says the type of the result.

    Exactness: forward bitwise for relu and relu6, otherwise reordered.

    Source: ``fuse_elewise_add_act_ops`` of Paddle.

    Example:
        >>> add_act(torch.tensor([1.0, -3.0]), torch.tensor([1.0, 1.0]), "relu")
        tensor([2., 0.])
    """
    if not is_alike(left, right) or left.numel() < SMALL:
        return reference(left, right, activation, in_place=in_place)
    operation: Any = AddAct
    result: Tensor = operation.apply(left, right, activation)
    return result


def reference(
    left: Tensor, right: Tensor, activation: ActivationName, *, in_place: bool = False
) -> Tensor:
    """The same by torch's functions, one after another."""
    total = left.add_(right) if in_place else left + right
    return ACTIVATIONS[activation].forward(total)


class AddAct(torch.autograd.Function):
    """Named for traces."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, activation: ActivationName) -> Tensor:
        result: Tensor
        result, kept = compiled(_forward, activation, left.dtype)(left, right, activation)
        ctx.save_for_backward(result if kept is None else kept)
        ctx.activation = activation
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (kept,) = ctx.saved_tensors
        compute = compiled(_backward, ctx.activation, kept.dtype)
        moved: Tensor = compute(gradient, kept, ctx.activation)
        return moved, moved, None


def _forward(
    left: Tensor, right: Tensor, activation: ActivationName
) -> tuple[Tensor, Tensor | None]:
    act = ACTIVATIONS[activation]
    total = left + right
    return act.forward(total), None if act.keeps_output else total


def _backward(gradient: Tensor, kept: Tensor, activation: ActivationName) -> Tensor:
    moved: Tensor = ACTIVATIONS[activation].backward(gradient, kept)
    return moved


def is_alike(left: object, right: object) -> bool:
    """Whether two operands are tensors of one shape and one floating type."""
    return (
        isinstance(left, Tensor)
        and isinstance(right, Tensor)
        and left.shape == right.shape
        and left.dtype == right.dtype
        and left.is_floating_point()
    )
