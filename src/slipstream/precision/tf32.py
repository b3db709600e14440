"""TF32: on CUDA, fp32 matrix products and convolutions round inputs to 10 bits of mantissa."""

from __future__ import annotations

from collections.abc import Callable

import torch

_holders: list[Callable[[], None]] = []
_before: list[str] = []
"""The settings that the last holder restores: sessions end in any order."""


def allow_tf32() -> Callable[[], None]:
    """Allow TF32 in this process; returns a function that undoes it, once all are called.

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
    if not _holders:
        _before[:] = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32"

    def undo() -> None:
        _holders.remove(undo)
        if not _holders:
            for place, precision in zip(places, _before, strict=True):
                place.fp32_precision = precision

    _holders.append(undo)
    return undo
