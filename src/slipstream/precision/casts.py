"""Floating-point tensors from one width to another, in whatever a model takes or returns."""

from __future__ import annotations

from typing import TypeVar

import torch

from slipstream.pytree import mapped

T = TypeVar("T")

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types that a strategy names."""

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def cast(value: T, dtype: torch.dtype) -> T:
    """``value`` with its tensors of 16 and 32 bits in ``dtype``, at any depth of its containers.

    What is fp64, complex or no float was made so on purpose, and stays; so do numbers (tensors of
    no axes, a loss say) where ``dtype`` has 16 bits: they do not decide the type of a result.

    Example:
        >>> output = cast({"logits": torch.ones(2), "words": torch.tensor([3])}, torch.bfloat16)
        >>> output["logits"].dtype, output["words"].dtype
        (torch.bfloat16, torch.int64)
    """

    def one(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.dtype not in _CAST or (dtype.itemsize == 2 and not tensor.dim())
        return tensor if stays else tensor.to(dtype)

    found: T = mapped(value, one)
    return found
