"""Trust ratios of all layers at once, by foreach operations.

A layer with weights ``w`` and direction ``d`` moves by ``lr |w| / |d| * d``, so every layer changes
by the same share of its norm.

Norms are 2-norms over all elements of a parameter. Nothing here synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor, as one tensor of shape (n,); all of one device and dtype.

    Computed in float32 for 16-bit tensors (squares overflow float16 from 256 on).

    Example:
        >>> norms([torch.tensor([3.0, 4.0]), torch.zeros(2, 2)])
        tensor([5., 0.])
        >>> norms([torch.full((4,), 300.0, dtype=torch.float16)])
        tensor([600.])
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide))


def one_where_zero(ratios: Tensor, weights: Tensor, steps: Tensor) -> Tensor:
    """``ratios``, but 1 where a norm is 0: otherwise a layer of zeros would stay zero.

    Example:
        >>> weights, steps = torch.tensor([2.0, 0.0, 3.0]), torch.tensor([4.0, 1.0, 0.0])
        >>> one_where_zero(weights / steps, weights, steps)
        tensor([0.5000, 1.0000, 1.0000])
    """
    return torch.where((weights > 0) & (steps > 0), ratios, 1.0)


def multiply_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply all tensors in place by one number, or by a 0-d tensor on their device.

    Example:
        >>> moment = torch.tensor([1000.0], dtype=torch.bfloat16)
        >>> multiply_([moment], 0.995)
        >>> moment
        tensor([996.], dtype=torch.bfloat16)
    """
    first = tensors[0]
    if first.device.type == "cpu" and first.itemsize == 2 and not isinstance(factor, Tensor):
        # torch 2.13 on the CPU rounds a Python number to 16 bits first: 0.999 becomes 1.
        factor = torch.tensor(factor)
    torch._foreach_mul_(list(tensors), factor)


def descend_(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], lr: float | Tensor
) -> None:
    """``parameters -= lr * directions``, in place."""
    rate = rate_on(lr, parameters[0].device)
    if isinstance(rate, Tensor):
        torch._foreach_sub_(list(parameters), torch._foreach_mul(list(directions), rate))
    else:
        torch._foreach_add_(list(parameters), list(directions), alpha=-rate)


def rate_on(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """``lr``, where it is a tensor of one element, as a 0-d tensor on ``device``."""
    return lr.to(device).reshape(()) if isinstance(lr, Tensor) else lr


def norm(tensor: Tensor) -> Tensor:
    """The norm of one tensor in plain torch: what `norms` is tested against."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return length
