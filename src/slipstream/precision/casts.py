"""Cast the floating-point tensors in nested inputs and outputs of a model."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from slipstream.pytree import LEAVES, mapped

T = TypeVar("T")

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by their names in a strategy."""

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def cast(value: T, dtype: torch.dtype) -> T:
    """Copy of ``value`` with its fp32, bf16 and fp16 tensors cast to ``dtype``, at any depth.

    fp64, complex and integer tensors stay. Scalars (tensors without axes, e.g. a loss) stay when
    ``dtype`` has 16 bits: torch's type promotion ignores them.

    Example:
        >>> output = cast({"logits": torch.ones(2), "words": torch.tensor([3])}, torch.bfloat16)
        >>> output["logits"].dtype, output["words"].dtype
        (torch.bfloat16, torch.int64)
    """

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.dtype not in _CAST or (dtype.itemsize == 2 and not tensor.dim())
        return tensor if stays else tensor.to(dtype)

    def leaf(item: Any) -> Any:
        return cast_one(item) if isinstance(item, torch.Tensor) else item

    found: Any = value
    # Most arguments. Of what follows torch.compile makes another graph for each tuple, by its id.
    if type(found) is tuple and all(isinstance(item, LEAVES) for item in found):
        found = tuple(map(leaf, found))
    elif type(found) is dict and all(isinstance(item, LEAVES) for item in found.values()):
        found = {name: leaf(item) for name, item in found.items()}
    else:
        found = mapped(found, cast_one)
    result: T = found
    return result
