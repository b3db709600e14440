"""Pad, roll and cut a feature map into windows in one pass over it, and the way back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.kernels.surroundings import needs_plain_functions


def window_partition(maps: Tensor, window: int, shift: int = 0) -> Tensor:
    """Cut maps into windows: pad to multiples of ``window``, roll by ``-shift``, cut.

    Written with torch's functions, padding, rolling and cutting copy the map three times. Here
    every position of the result is read from where it comes from; with H and W the padded sides::

        windows[b, i, j, y, x] = maps[b, (i window + y + shift) mod H, (j window + x + shift) mod W]

    Args:
        maps: (images, height, width, channels); neither side needs to be a multiple of ``window``.
        window: cells a side.
        shift: from 0 to ``window - 1``; 0 is no roll.

    Returns:
        (images * windows, window, window, channels), contiguous; zeros where the map was padded.

    Exactness: bitwise `reference_partition`, its gradient bitwise too (`window_merge` computes it).
    Transforms of ``torch.func`` and ``torch.jit.trace`` take that.

    Raises:
        UsageError: not four axes, an empty map, or a shift outside the window.

    Source: ``fused_window_process`` of Swin Transformer, which needs whole windows, square maps and
    32 bits.

    Example:
        >>> maps = torch.arange(9.0).view(1, 3, 3, 1)
        >>> window_partition(maps, 2, shift=1)[0, ..., 0]
        tensor([[4., 5.],
                [7., 8.]])
    """
    _check(maps, window, shift)
    if needs_plain_functions():
        return reference_partition(maps, window, shift)
    result: Tensor = _Partition.apply(maps, window, shift)  # type: ignore[no-untyped-call]
    return result


def window_merge(windows: Tensor, window: int, size: tuple[int, int], shift: int = 0) -> Tensor:
    """Put windows back together: the inverse of `window_partition`, padding cut off.

    Args:
        windows: (images * windows, window, window, channels), also with the two axes of a window
            as one.
        window, shift: as they were given to `window_partition`.
        size: height and width of the map, before it was padded.

    Returns:
        (images, height, width, channels), contiguous.

    Exactness: bitwise `reference_merge`, its gradient bitwise too.

    Raises:
        UsageError: not as many windows as a number of maps of this size has.

    Example:
        >>> maps = torch.randn(2, 5, 7, 3)
        >>> windows = window_partition(maps, 4, shift=2)
        >>> window_merge(windows, 4, (5, 7), shift=2).equal(maps)
        True
    """
    height, width = size
    cells = _padded(height, window) * _padded(width, window)
    channels = windows.shape[-1]
    if windows.numel() % max(cells * channels, 1) or not 0 <= shift < window:
        raise UsageError(
            f"windows have the shape {tuple(windows.shape)} and shift is {shift}; allowed for maps "
            f"of {height} x {width} with windows of {window} x {window}: multiples of "
            f"{cells // window**2} windows, and a shift from 0 to {window - 1}"
        )
    if needs_plain_functions():
        return reference_merge(windows, window, size, shift)
    result: Tensor = _Merge.apply(windows, window, (height, width), shift)  # type: ignore[no-untyped-call]
    return result


def reference_partition(maps: Tensor, window: int, shift: int = 0) -> Tensor:
    """`window_partition` as three functions of torch."""
    images, height, width, channels = maps.shape
    right, below = _padded(width, window) - width, _padded(height, window) - height
    maps = F.pad(maps, (0, 0, 0, right, 0, below)).roll((-shift, -shift), (1, 2))
    rows, columns = (height + below) // window, (width + right) // window
    cut = maps.view(images, rows, window, columns, window, channels)
    return cut.transpose(2, 3).reshape(-1, window, window, channels)


def reference_merge(windows: Tensor, window: int, size: tuple[int, int], shift: int = 0) -> Tensor:
    """`window_merge` as three functions of torch."""
    height, width = size
    rows, columns = _padded(height, window) // window, _padded(width, window) // window
    cut = windows.reshape(-1, rows, columns, window, window, windows.shape[-1])
    maps = cut.transpose(2, 3).reshape(-1, rows * window, columns * window, windows.shape[-1])
    return maps.roll((shift, shift), (1, 2))[:, :height, :width].contiguous()


class _Partition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, window: int, shift: int) -> Tensor:
        images, height, width, channels = maps.shape
        ctx.window, ctx.size, ctx.shift = window, (height, width), shift
        source, padding = _source(images, height, width, window, shift, maps.device)
        windows = maps.reshape(images * height * width, channels).index_select(0, source)
        if padding is not None:
            windows.index_fill_(0, padding, 0)
        return windows.view(len(source) // window**2, window, window, channels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return window_merge(gradients[0], ctx.window, ctx.size, ctx.shift), None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, windows: Tensor, window: int, size: tuple[int, int], shift: int
    ) -> Tensor:
        height, width = size
        ctx.window, ctx.shift, ctx.shape = window, shift, windows.shape
        cells, channels = _padded(height, window) * _padded(width, window), windows.shape[-1]
        images = windows.numel() // (cells * channels)
        target = _target(images, height, width, window, shift, windows.device)
        rows = windows.reshape(images * cells, channels).index_select(0, target)
        return rows.view(images, height, width, channels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        windows = window_partition(gradients[0], ctx.window, ctx.shift)
        return windows.view(ctx.shape), None, None, None


@lru_cache(maxsize=256)
def _source(
    images: int, height: int, width: int, window: int, shift: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The cell of the maps for every position in the windows, and which positions are padding."""
    y, x = _coordinates(height, width, window, shift)
    inside = (y < height) & (x < width)
    cells = _of_all(torch.where(inside, y * width + x, 0), images, height * width)
    padding = (~inside.repeat(images)).nonzero().squeeze(1)
    return cells.to(device), padding.to(device) if len(padding) else None


@lru_cache(maxsize=256)
def _target(
    images: int, height: int, width: int, window: int, shift: int, device: torch.device
) -> Tensor:
    """The position in the windows of every cell of the maps."""
    y, x = _coordinates(height, width, window, shift)
    inside = ((y < height) & (x < width)).nonzero().squeeze(1)
    target = torch.empty(height * width, dtype=torch.int64)
    target[(y * width + x)[inside]] = inside
    return _of_all(target, images, len(y)).to(device)


def _of_all(positions: Tensor, images: int, step: int) -> Tensor:
    """The positions in the first image, and ``step`` further in each next one."""
    return (step * torch.arange(images).unsqueeze(1) + positions).flatten()


def _coordinates(height: int, width: int, window: int, shift: int) -> tuple[Tensor, Tensor]:
    """Row and column in the padded map of every position in the windows, (positions,) each."""
    tall, wide = _padded(height, window), _padded(width, window)
    cells = torch.arange(tall * wide).view(1, tall, wide, 1)
    there = reference_partition(cells, window, shift).flatten()
    return there // wide, there % wide


def _padded(length: int, window: int) -> int:
    """The next multiple of ``window``."""
    return -(-length // window) * window


def _check(maps: Tensor, window: int, shift: int) -> None:
    if maps.ndim != 4 or 0 in maps.shape[1:]:
        raise UsageError(
            f"maps have the shape {tuple(maps.shape)}; allowed: (images, height, width, channels)"
        )
    if window < 1 or not 0 <= shift < window:
        raise UsageError(
            f"window is {window} and shift {shift}; allowed: a window from 1 on, and a shift from "
            "0 to window - 1"
        )
