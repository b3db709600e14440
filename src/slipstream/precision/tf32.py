"""TF32: on CUDA, fp32 matrix products and convolutions round inputs to 10 bits of mantissa."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allow_tf32() -> Callable[[], None]:
    """Allow TF32 in this process; returns a function that undoes it.

    Exactness: lossy. No effect without CUDA.

    Example:
        >>> undo = allow_tf32()
        >>> torch.backends.cuda.matmul.fp32_precision
        'tf32'
        >>> undo()

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
    """
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    places = (torch.backends.cuda.matmul, convolutions)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32"

    def undo() -> None:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision

    return undo
