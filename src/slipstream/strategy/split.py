"""Splits: which gradients share one exchange.

Gradients count in ready order, the order in which backward produces them: the first belongs to the
output layer. Never looks at a model: ``gradients.layout`` makes segments of these values.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from slipstream.strategy.setting import Exactness, Variant, from_kind


class ByBytes(Variant):
    """Segments close when they reach a size.

    A small first segment starts the exchange early; a small last one is short where nothing is
    left to hide it behind. 1 megabyte is 2**20 bytes; null means no special size. The default
    of 8 MB is a compromise over three models at 1 Gbit/s (benchmarks/results).

    Example:
        >>> ByBytes(megabytes=16).first_megabytes
        1.0
    """

    kind: Literal["by_bytes"] = "by_bytes"
    exactness: ClassVar[Exactness] = "reordered"

    megabytes: PositiveFloat = 8.0
    """Size at which a segment closes."""

    first_megabytes: PositiveFloat | None = 1.0
    """Size at which the first segment closes."""

    last_megabytes: PositiveFloat | None = 1.0
    """Size within which the last segment stays, if it holds more than one gradient and others
    came before it: a model whose rest does not reach ``first_megabytes`` is one segment."""


class ByPercent(Variant):
    """Segments hold given shares of the gradient bytes.

    Each cut falls on the border between two gradients that is nearest to its mark. The percentages
    sum to 100 within 0.01. Both the idea and the default are those of Ascend's HCCL.

    Example:
        >>> ByPercent(percents=(60, 20, 20)).percents
        (60.0, 20.0, 20.0)
    """

    kind: Literal["by_percent"] = "by_percent"
    exactness: ClassVar[Exactness] = "reordered"

    percents: tuple[PositiveFloat, ...] = Field(default=(96.54, 3.46), strict=False)
    """Share of the bytes of each segment, in ready order."""

    @field_validator("percents")
    @classmethod
    def _sum_to_100(cls, percents: tuple[float, ...]) -> tuple[float, ...]:
        excess = sum(percents) - 100
        if abs(excess) > 0.01:
            fix = f"take {excess:.10g} away" if excess > 0 else f"add {-excess:.10g}"
            raise ValueError(f"sums to {excess + 100:.10g}; allowed: a sum of 100; {fix}")
        return percents


class ByIndex(Variant):
    """Segments end after the gradients of given indices.

    Indices count from 0 and ascend; the last one must be that of the model's last gradient, which
    is checked when the model is known. As in Ascend's HCCL.

    Example:
        >>> ByIndex(last=(20, 100, 159)).last
        (20, 100, 159)
    """

    kind: Literal["by_index"] = "by_index"
    exactness: ClassVar[Exactness] = "reordered"

    last: tuple[NonNegativeInt, ...] = Field(min_length=1, strict=False, examples=[[20, 100, 159]])
    """Index of the last gradient of each segment."""

    @field_validator("last")
    @classmethod
    def _ascend(cls, last: tuple[int, ...]) -> tuple[int, ...]:
        if list(last) != sorted(set(last)):
            raise ValueError(f"not ascending; allowed: e.g. last: {sorted(set(last))}")
        return last


class ByLayers(Variant):
    """Segments hold the gradients of a number of layers at most.

    A layer is a module that has parameters of its own. As in Paddle Fleet.

    Example:
        >>> ByLayers(layers=50).layers
        50
    """

    kind: Literal["by_layers"] = "by_layers"
    exactness: ClassVar[Exactness] = "reordered"

    layers: int = Field(ge=1, examples=[50])
    """Most layers a segment holds."""


class PerLayer(Variant):
    """One segment a layer: its weight and bias share it."""

    kind: Literal["per_layer"] = "per_layer"
    exactness: ClassVar[Exactness] = "reordered"


class PerGradient(Variant):
    """One segment a gradient: nothing is fused."""

    kind: Literal["per_gradient"] = "per_gradient"
    exactness: ClassVar[Exactness] = "reordered"


class Single(Variant):
    """One segment of all gradients: nothing overlaps."""

    kind: Literal["single"] = "single"
    exactness: ClassVar[Exactness] = "reordered"


class Optimal(Variant):
    """The best split for this model on this network, found while the training runs.

    The first iterations run under the default split and are traced. Then rank 0 computes the split
    whose predicted iteration is shortest from the measured ready times and the measured cost of an
    exchange (``planner.split``). The default, this one and two with larger segments take turns,
    twice, all ranks switching at one step, and the fastest stays. ``session.report()`` says what
    came of it, ``state_dict()`` keeps it.

    Example:
        >>> Optimal(steps=20).steps
        20
    """

    kind: Literal["optimal"] = "optimal"
    exactness: ClassVar[Exactness] = "reordered"

    steps: PositiveInt = 10
    """Iterations that are measured each time, twice under each split."""


_AnySplit = ByBytes | ByPercent | ByIndex | ByLayers | PerLayer | PerGradient | Single | Optimal
_PlainSplit = Literal["by_bytes", "by_percent", "per_layer", "per_gradient", "single", "optimal"]

Split = Annotated[
    _AnySplit,
    Field(discriminator="kind"),
    BeforeValidator(from_kind, json_schema_input_type=_AnySplit | _PlainSplit),
]
"""A split, or the kind alone of one that needs no more: ``single`` for ``{kind: single}``."""
