"""The row for each point that its index names, with the index left on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import UsageError


def compress_by_index(values: Tensor, index: Tensor) -> Tensor:
    """``values[n, index[n]]`` for every n.

    FCOS3D reduces its targets so: each point keeps the row of the nearest object. Written as
    ``values[range(num_points), index]``, as it is in mmdetection3d, Python makes a list of as many
    numbers as there are points, which is copied to the device while the host waits.

    Args:
        values: (points, rows, ...), of any dtype.
        index: (points,), int64, on the device of ``values``; each from 0 to rows - 1.

    Returns:
        (points, ...), contiguous. Its gradient goes to the rows that were taken.

    Exactness: bitwise `reference`, backward included. One kernel, no host index, no
    synchronisation: an index out of range is refused on a CPU and trips a device-side assertion
    elsewhere.

    Raises:
        UsageError: the shapes or the devices do not fit.
        IndexError: on a CPU, an index is out of range.

    Source: ``FCOSMono3DHead._get_target_single`` of mmdetection3d.

    Example:
        >>> values = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
        >>> compress_by_index(values, torch.tensor([1, 0]))
        tensor([[3, 4],
                [5, 6]])
    """
    _check(values, index)
    points, rows = values.shape[:2]
    if values.device.type == "cpu":  # copies whole rows, gather goes value by value
        return values.flatten(0, 1).index_select(0, torch.arange(points) * rows + index)
    flat = values.reshape(points, rows, values[:1, :1].numel())
    wanted = index.view(points, 1, 1).expand(points, 1, flat.shape[2])
    return flat.gather(1, wanted).view(points, *values.shape[2:])


def reference(values: Tensor, index: Tensor) -> Tensor:
    """The same, as mmdetection3d writes it: with a list on the host."""
    return values[range(len(index)), index]


def _check(values: Tensor, index: Tensor) -> None:
    if values.ndim < 2 or index.shape != values.shape[:1]:
        raise UsageError(
            f"values have the shape {tuple(values.shape)} and the index {tuple(index.shape)}; "
            "allowed: (points, rows, ...) and (points,)"
        )
    if index.dtype != torch.int64 or index.device != values.device:
        raise UsageError(
            f"the index is {index.dtype} on {index.device}; allowed: torch.int64 on the device of "
            f"the values, {values.device}; convert it with index.to({str(values.device)!r}, "
            "torch.int64)"
        )
    if index.device.type == "cpu" and len(index):
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= values.shape[1]:
            text = f"indices are from {low} to {high}, out of bounds for {values.shape[1]} rows"
            raise IndexError(text)
