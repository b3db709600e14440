"""Which gradients share an exchange: a pure function from gradients and a split to segments.

Never sees a tensor or a process group. The engine, the preview table and the simulator call the
same function, so they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from slipstream.errors import ModelError, StrategyError
from slipstream.strategy import (
    ByBytesConfig,
    ByIndexConfig,
    ByLayersConfig,
    ByPercentConfig,
    OptimalConfig,
    PerGradientConfig,
    PerLayerConfig,
    SingleConfig,
    SplitConfig,
)

MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient as the layout sees it: the name of its parameter, its layer and its bytes.

    ``num_bytes`` is 0 for a sparse gradient, which is exchanged beside the dense ones: its size is
    known only in backward. Gradients of one segment travel in one collective for each ``dtype``.
    ``registered`` is the place of its parameter among the model's trainable ones; -1: unknown.
    """

    name: str
    layer: str
    num_bytes: int
    dtype: str = "float32"
    registered: int = -1


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """The gradients ``[start, stop)`` of the ready order, which are exchanged together."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def plan_segments(gradients: Sequence[Gradient], split: SplitConfig) -> tuple[SegmentRange, ...]:
    """Cut gradients, given in ready order, into contiguous segments.

    Ready order is the order in which backward produces gradients: the output layer comes first.

    Raises:
        ModelError: there is nothing to split.
        StrategyError: the split does not fit this number of gradients.

    Example:
        >>> from slipstream.strategy import ByPercentConfig
        >>> ready = [Gradient("b", "2", 30), Gradient("a", "1", 60), Gradient("c", "0", 10)]
        >>> plan_segments(ready, ByPercentConfig(percents=(90, 10)))
        (SegmentRange(start=0, stop=2), SegmentRange(start=2, stop=3))
    """
    if not gradients:
        raise ModelError(
            "the model has no parameter that requires a gradient, so there is nothing to split or "
            "exchange; set requires_grad=True on what is to be trained before accelerate()"
        )
    stops = sorted({*_SPLITS[type(split)](gradients, split), len(gradients)} - {0})
    return tuple(SegmentRange(start, stop) for start, stop in pairwise([0, *stops]))


def nearest_border(sizes: Sequence[float], part: float) -> int:
    """Count how many of the first sizes sum up to about a part of all: the nearest such number.

    Example:
        >>> nearest_border([30, 60, 10], 0.5)
        1
    """
    borders = [0, *accumulate(sizes)]
    return min(range(len(borders)), key=lambda i: abs(borders[i] - part * borders[-1]))


def _by_bytes(gradients: Sequence[Gradient], split: ByBytesConfig) -> Iterable[int]:
    """Close a segment when it reaches its size; the last one is small, as no backward hides it.

    Gradients that do not fill a first segment join the last one: on a small model another exchange
    costs more than it hides.
    """
    num_bytes = [g.num_bytes for g in gradients]
    tail = _last_segment_start(num_bytes, split.last_megabytes)
    limit = (split.first_megabytes or split.megabytes) * MEGABYTE
    filled, closed = 0, False
    for index, size in enumerate(num_bytes[:tail]):
        filled += size
        if filled >= limit:
            yield index + 1
            filled, limit = 0, split.megabytes * MEGABYTE
            closed = True
    if closed or split.first_megabytes is None:
        yield tail


def _last_segment_start(num_bytes: Sequence[int], last_megabytes: float | None) -> int:
    """The last segment has as many of the last gradients as fit, at least one."""
    if last_megabytes is None:
        return len(num_bytes)
    room = last_megabytes * MEGABYTE
    start = len(num_bytes) - 1
    room -= num_bytes[start]
    while start > 0 and num_bytes[start - 1] <= room:
        start -= 1
        room -= num_bytes[start]
    return start


def _by_percent(gradients: Sequence[Gradient], split: ByPercentConfig) -> Iterable[int]:
    """Cut at the border nearest to each percentage; equal borders make one cut."""
    sizes = [gradient.num_bytes for gradient in gradients]
    for mark in accumulate(split.percents[:-1]):
        yield nearest_border(sizes, mark / 100)


def _by_index(gradients: Sequence[Gradient], split: ByIndexConfig) -> Iterable[int]:
    if split.last[-1] != len(gradients) - 1:
        raise StrategyError(
            f"gradients.split.last ends with {split.last[-1]}, but this model has {len(gradients)} "
            f"gradients, counted from 0 in ready order; the last index must be {len(gradients) - 1}"
        )
    return (index + 1 for index in split.last)


def _by_layers(gradients: Sequence[Gradient], split: ByLayersConfig) -> Iterable[int]:
    """Cut after every ``layers`` layers; a layer is the module that owns the parameters."""
    borders = _layer_borders(gradients)
    return borders[split.layers - 1 :: split.layers]


def _per_layer(gradients: Sequence[Gradient], split: PerLayerConfig) -> Iterable[int]:
    return _layer_borders(gradients)


def _layer_borders(gradients: Sequence[Gradient]) -> list[int]:
    return [i for i in range(1, len(gradients)) if gradients[i].layer != gradients[i - 1].layer]


def _per_gradient(gradients: Sequence[Gradient], split: PerGradientConfig) -> Iterable[int]:
    return range(1, len(gradients))


def _single(gradients: Sequence[Gradient], split: SingleConfig) -> Iterable[int]:
    return ()


def _optimal(gradients: Sequence[Gradient], split: OptimalConfig) -> Iterable[int]:
    """The split that training begins with; the computed one is a ``ByIndexConfig``."""
    return _by_bytes(gradients, ByBytesConfig())


_SPLITS: dict[type, Callable[..., Iterable[int]]] = {
    ByBytesConfig: _by_bytes,
    ByPercentConfig: _by_percent,
    ByIndexConfig: _by_index,
    ByLayersConfig: _by_layers,
    PerLayerConfig: _per_layer,
    PerGradientConfig: _per_gradient,
    SingleConfig: _single,
    OptimalConfig: _optimal,
}
