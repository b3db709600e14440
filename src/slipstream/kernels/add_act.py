"""The sum of two tensors and an activation, in one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.activations import ACTIVATIONS, ActivationName
from slipstream.kernels.compiled import compiled
from slipstream.kernels.surroundings import differentiates_plainly, needs_plain_functions

SMALL = 1 << 21
"""Values below which torch's two functions are faster: in the caches they have no memory to wait
for, and the checks before a compiled kernel take 50 us a call."""


def add_act(
    left: Tensor, right: Tensor, activation: ActivationName, *, in_place: bool = False
) -> Tensor:
    """``activation(left + right)`` in one kernel; backward is one kernel, too.

    The sum is not kept: backward needs the result, or for an activation such as gelu adds again. So
    it keeps two tensors where torch keeps the sum, of which a network mostly keeps one anyway.
    Second derivatives, transforms of ``torch.func`` and ``torch.jit.trace`` take torch's functions.

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
    if not is_alike(left, right) or left.numel() < SMALL or needs_plain_functions():
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
        result: Tensor = compiled(_forward, activation, left.dtype)(left, right, activation)
        kept = (result,) if ACTIVATIONS[activation].keeps_output else (left, right)
        ctx.save_for_backward(*kept)
        ctx.activation = activation
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        first, *second = ctx.saved_tensors
        # for second derivatives, of which a kernel has none
        plain = differentiates_plainly(gradient)
        compute = _backward if plain else compiled(_backward, ctx.activation, first.dtype)
        moved: Tensor = compute(gradient, ctx.activation, first, *second)
        return moved, moved, None


def _forward(left: Tensor, right: Tensor, activation: ActivationName) -> Tensor:
    return ACTIVATIONS[activation].forward(left + right)


def _backward(gradient: Tensor, activation: ActivationName, *kept: Tensor) -> Tensor:
    total = kept[0] + kept[1] if len(kept) > 1 else kept[0]
    moved: Tensor = ACTIVATIONS[activation].backward(gradient, total)
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


def is_small(values: Tensor) -> bool:
    """Whether torch's two functions are faster on this tensor."""
    return values.numel() < SMALL
