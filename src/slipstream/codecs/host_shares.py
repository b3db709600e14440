"""Which values of a bucket are in which share, and what a state holds of these.

[Note: Which share a value is in]
``half`` cuts anywhere, ``int8`` and ``onebit`` between blocks. ``dgc`` and ``powersgd`` need whole
gradients (a norm, a matrix), so their shares begin where a gradient begins, as evenly as that goes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.codecs.compressor import SlotState, memory_order
from slipstream.strategy import (
    HalfConfig,
    Int4Config,
    Int8Config,
    OneBitConfig,
    PlainCodecConfig,
    TopKConfig,
)


@dataclass(frozen=True, slots=True)
class HostPart:
    """Elements of the gradient in a slot that are in a share."""

    slot: int
    start: int
    stop: int


def allowed_borders(codec: PlainCodecConfig, slots: Sequence[slice], hosts: int) -> Sequence[int]:
    """Places where shares may begin and end, from 0 to the end, which may be behind the last slot.

    Example:
        >>> from slipstream.strategy import DgcConfig
        >>> allowed_borders(Int8Config(block=8), [slice(0, 40)], hosts=2)
        range(0, 49, 16)
        >>> allowed_borders(DgcConfig(), [slice(0, 3), slice(3, 9)], hosts=2)
        [0, 3, 9]
    """
    end = slots[-1].stop
    match codec:
        case Int8Config() | Int4Config() | OneBitConfig():
            unit = codec.block * hosts
            return range(0, -(-end // unit) * unit + 1, unit)
        case TopKConfig():
            return range(0, -(-end // codec.chunk) * codec.chunk + 1, codec.chunk)
        case HalfConfig():
            return range(end + 1)
        case _:
            return [0, *(slot.stop for slot in slots)]


def nearest_borders(allowed: Sequence[int], shares: int) -> list[int]:
    """Cut into so many shares as evenly as ``allowed`` borders let it; some may be empty.

    Args:
        allowed: ascending, from 0 to the end.
        shares: how many.

    Example:
        >>> nearest_borders(range(0, 17, 8), 3), nearest_borders([0, 10, 11, 100], 2)
        ([0, 8, 8, 16], [0, 11, 100])
    """
    borders = []
    for number in range(shares + 1):
        ideal = number * allowed[-1] / shares
        after = bisect(allowed, ideal)
        near = allowed[max(after - 1, 0) : after + 1]
        borders.append(min(near, key=lambda border: abs(border - ideal)))
    return borders


def parts_of(share: slice, slots: Sequence[slice]) -> list[HostPart]:
    """The parts of slots that are in a share.

    Example:
        >>> parts_of(slice(2, 5), [slice(0, 3), slice(3, 9)])
        [HostPart(slot=0, start=2, stop=3), HostPart(slot=1, start=0, stop=2)]
    """
    ends = [(max(s.start, share.start), min(s.stop, share.stop)) for s in slots]
    return [
        HostPart(number, start - slot.start, stop - slot.start)
        for number, (slot, (start, stop)) in enumerate(zip(slots, ends, strict=True))
        if start < stop
    ]


def taken(parameter: Tensor, part: HostPart) -> Tensor:
    """A part of a parameter, 1-D and real, or the parameter, where that is all of it."""
    values = memory_order(parameter)
    if part.stop - part.start == values.numel():
        return parameter
    return values[part.start : part.stop]


def cut(state: SlotState, part: HostPart) -> dict[str, Tensor]:
    """Cut a part out of a state; ``q`` belongs to whole gradients."""
    taken = {}
    for key, value in state.items():
        if key in ("error", "momentum", "velocity"):
            taken[key] = value[part.start : part.stop]
        elif key == "q":
            taken[key] = value
    if "served" in state:
        first = int(state["served_from"])
        start = max(first, part.start)
        stop = min(first + len(state["served"]), part.stop)
        if start < stop:
            taken["served"] = state["served"][start - first : stop - first]
            taken["served_from"] = torch.tensor(start - part.start)
    return taken


def join(state: dict[str, Tensor], of_part: SlotState, part: HostPart, numel: int) -> None:
    """Enter the state of a part into that of its slot, of ``numel`` values; the inverse of
    ``cut``. Parts come in their order."""
    for key, value in of_part.items():
        if key in ("error", "momentum", "velocity"):
            if key not in state:
                state[key] = value.new_zeros(numel)
            state[key][part.start : part.stop] = value
        elif key == "q":
            state[key] = value
    if "served" in of_part:
        first = part.start + int(of_part["served_from"])
        begin = int(state["served_from"]) if "served" in state else first
        served = of_part["served"].new_zeros(first + len(of_part["served"]) - begin)
        if "served" in state:
            served[: len(state["served"])] = state["served"]
        served[first - begin :] = of_part["served"]
        state["served"], state["served_from"] = served, torch.tensor(begin)
