"""Tensors that kernels walk together by their memory: the same value at the same place in each."""

from __future__ import annotations

import torch
from torch import Tensor


def lies_like(tensor: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors of one shape have their values in the same order of memory.

    Example:
        >>> lies_like(torch.zeros(2, 3), torch.zeros(3, 2).t())
        False
        >>> lies_like(torch.zeros(1, 3), torch.zeros(3, 1).t())  # an axis of one value has no order
        True
    """
    ours, theirs = tensor.stride(), other.stride()
    if ours == theirs:
        return True
    both = zip(tensor.shape, ours, theirs, strict=True)
    return all(length == 1 or one == two for length, one, two in both)


def laid_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The values in the order of memory of ``other``: ``tensor`` itself, where it has that.

    Example:
        >>> laid_like(torch.zeros(2, 3), torch.zeros(3, 2).t()).stride()
        (1, 2)
    """
    if lies_like(tensor, other):
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
