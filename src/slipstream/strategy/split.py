"""Splits: which gradients share one exchange.

Gradients are numbered in ready order, the order in which backward produces them, so the output
layer comes first. ``gradients.layout`` turns these values into segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from slipstream.strategy.setting import OneOf, Variant


class ByBytesConfig(Variant, kind="by_bytes", exactness="reordered"):
    """A segment closes when it reaches a size.

    A small first segment starts the exchange early; a small last one is short, because no backward
    is left to hide it. 1 megabyte is 2**20 bytes; null means no special size. The default
    of 4 MB was level with 2 and 8 MB on a ResNet-50 at 1 Gbit/s, and 5 % faster than 8 MB on a BERT
    of which one embedding holds most of the gradients.

    Example:
        >>> ByBytesConfig(megabytes=16).first_megabytes
        1.0
    """

    megabytes: PositiveFloat = 4.0
    """Size at which a segment closes."""

    first_megabytes: PositiveFloat | None = 1.0
    """Size at which the first segment closes."""

    last_megabytes: PositiveFloat | None = 1.0
    """Largest size of the last segment, unless it holds a single gradient or is the only segment: a
    model whose remaining gradients do not reach ``first_megabytes`` is one segment."""


class ByPercentConfig(Variant, kind="by_percent", exactness="reordered"):
    """Segments hold given percentages of the gradient bytes.

    Each segment ends at the gradient boundary nearest to its mark. The percentages sum to 100
    within 0.01. Idea and default come from Ascend's HCCL.

    Example:
        >>> ByPercentConfig(percents=(60, 20, 20)).percents
        (60.0, 20.0, 20.0)
    """

    percents: tuple[PositiveFloat, ...] = Field(default=(96.54, 3.46), strict=False)
    """Share of the bytes of each segment, in ready order."""

    @field_validator("percents")
    @classmethod
    def _sum_to_100(cls, percents: tuple[float, ...]) -> tuple[float, ...]:
        excess = sum(percents) - 100
        if abs(excess) > 0.01:
            fix = f"subtract {excess:.10g}" if excess > 0 else f"add {-excess:.10g}"
            raise ValueError(f"sums to {excess + 100:.10g}; allowed: a sum of 100; {fix}")
        return percents


class ByIndexConfig(Variant, kind="by_index", exactness="reordered"):
    """Segments end after the gradients with the given indices.

    Indices start at 0 and ascend; the last one must be the index of the model's last gradient,
    which ``accelerate()`` checks. As in Ascend's HCCL.

    Example:
        >>> ByIndexConfig(last=(20, 100, 159)).last
        (20, 100, 159)
    """

    last: tuple[NonNegativeInt, ...] = Field(min_length=1, strict=False, examples=[[20, 100, 159]])
    """Index of the last gradient of each segment."""

    @field_validator("last")
    @classmethod
    def _ascend(cls, last: tuple[int, ...]) -> tuple[int, ...]:
        if list(last) != sorted(set(last)):
            raise ValueError(f"not ascending; allowed: e.g. last: {sorted(set(last))}")
        return last

    @classmethod
    def of_cuts(cls, cuts: Iterable[int]) -> ByIndexConfig:
        """Name segments by the index after the last gradient of each, as a computed split does.

        Example:
            >>> ByIndexConfig.of_cuts([21, 160]).last
            (20, 159)
        """
        return cls(last=tuple(int(cut) - 1 for cut in cuts))


class ByLayersConfig(Variant, kind="by_layers", exactness="reordered"):
    """A segment holds the gradients of at most ``layers`` layers.

    A layer is a module with parameters of its own. As in Paddle Fleet.

    Example:
        >>> ByLayersConfig(layers=50).layers
        50
    """

    layers: int = Field(ge=1, examples=[50])
    """Layers per segment, at most."""


class PerLayerConfig(Variant, kind="per_layer", exactness="reordered"):
    """One segment per layer: weight and bias share it."""


class PerGradientConfig(Variant, kind="per_gradient", exactness="reordered"):
    """One segment per gradient: nothing is fused."""


class SingleConfig(Variant, kind="single", exactness="reordered"):
    """One segment for all gradients: nothing overlaps."""


class OptimalConfig(Variant, kind="optimal", exactness="reordered"):
    """The best split for this model on this network, found during training.

    The first iterations run under the default split and are traced. Then rank 0 computes the split
    with the shortest predicted iteration from the measured ready times and the measured cost of an
    exchange (``planner.search.split``). The default, the computed split and two with larger
    segments run in turn, twice each; all ranks switch at the same step, and the fastest stays.
    ``session.report()`` shows the result, ``state_dict()`` keeps it.

    Example:
        >>> OptimalConfig(steps=20).steps
        20
    """

    steps: PositiveInt = 10
    """Iterations measured per turn; each split has two turns."""


SplitConfig = Annotated[
    ByBytesConfig
    | ByPercentConfig
    | ByIndexConfig
    | ByLayersConfig
    | PerLayerConfig
    | PerGradientConfig
    | SingleConfig
    | OptimalConfig,
    OneOf(),
]
"""A split, or only its kind where the defaults do: ``single`` for ``{kind: single}``."""
