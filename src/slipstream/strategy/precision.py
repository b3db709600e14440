"""Precision settings: 16-bit computation and the loss scale. ``precision`` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from slipstream.strategy.setting import OneOf, Variant, from_kind
from slipstream.strategy.validate import did_you_mean


class AutoScaleConfig(Variant, kind="auto", exactness="reordered"):
    """Dynamic for fp16; none for bf16, which has the range of fp32."""


class DynamicScaleConfig(Variant, kind="dynamic", exactness="reordered"):
    """The scale shrinks when gradients overflow and grows after many updates without an overflow.

    The defaults are those of ``torch.amp.GradScaler`` and Apex. Paddle's are ``init 32768,
    incr_every_n 1000, decr_every_n 2, decr_ratio 0.8``.

    Example:
        >>> DynamicScaleConfig(init=2.0**15, decr_every_n=2).incr_every_n
        2000
    """

    init: PositiveFloat = 65536.0
    """Scale of the first update."""

    incr_every_n: PositiveInt = 2000
    """Consecutive updates without overflow before the scale grows."""

    decr_every_n: PositiveInt = 1
    """Consecutive overflows before the scale shrinks."""

    incr_ratio: float = Field(default=2.0, gt=1)
    """Factor by which the scale grows."""

    decr_ratio: float = Field(default=0.5, gt=0, lt=1)
    """Factor by which the scale shrinks."""

    min: PositiveFloat = 1.0
    """Smallest scale."""

    max: PositiveFloat = 2.0**24
    """Largest scale."""

    @model_validator(mode="after")
    def _in_range(self) -> DynamicScaleConfig:
        if not self.min <= self.init <= self.max:
            raise ValueError(
                f"init {self.init:g} is outside min {self.min:g} to max {self.max:g}; "
                "allowed: min <= init <= max"
            )
        return self


class StaticScaleConfig(Variant, kind="static", exactness="reordered"):
    """A constant scale; updates whose gradients overflow are still skipped.

    Example:
        >>> StaticScaleConfig(scale=128.0).scale
        128.0
    """

    scale: PositiveFloat = Field(le=2.0**24, examples=[1024.0])  # the largest dynamic scale
    """Factor for losses."""


LossScaleConfig = Annotated[AutoScaleConfig | DynamicScaleConfig | StaticScaleConfig, OneOf()]
"""A loss scale, or only its kind where the defaults do."""

HalfType = Literal["bf16", "fp16"]


class _Half(Variant, exactness="lossy"):
    """Settings of both 16-bit modes."""

    dtype: HalfType = "bf16"
    """bf16: the range of fp32, 8 bits of mantissa. fp16: 6e-8 to 65504, 11 bits of mantissa."""

    loss_scale: LossScaleConfig | None = AutoScaleConfig()
    """Factor for losses, so that small gradients do not become 0 in fp16; null: none."""

    float_modules: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of module paths that stay fp32, with everything inside them."""

    emulate: bool = False
    """Accept fp16 on a CPU without fp16 instructions: hundreds of times slower."""

    @property
    def scale(self) -> DynamicScaleConfig | StaticScaleConfig | None:
        """The loss scale, with ``auto`` resolved.

        Example:
            >>> AutocastConfig().scale, AutocastConfig(dtype="fp16").scale.kind
            (None, 'dynamic')
        """
        if isinstance(self.loss_scale, AutoScaleConfig):
            return DynamicScaleConfig() if self.dtype == "fp16" else None
        return self.loss_scale


class AutocastConfig(_Half, kind="autocast"):
    """Matrix products and convolutions run in 16 bits, weights stay fp32 (O1).

    Example:
        >>> AutocastConfig(dtype="fp16", float_ops=("gelu",)).kind
        'autocast'
    """

    float_ops: tuple[str, ...] = Field(default=(), strict=False)
    """Torch functions that run in fp32, besides autocast's own, e.g. gelu."""

    half_ops: tuple[str, ...] = Field(default=(), strict=False)
    """Torch functions that run in 16 bits, e.g. softmax."""

    @model_validator(mode="after")
    def _one_of_both(self) -> AutocastConfig:
        if both := sorted({*self.float_ops} & {*self.half_ops}):
            raise ValueError(f"{both[0]!r} is in float_ops and in half_ops; keep it in one of them")
        return self


class HalfWeightsConfig(_Half, kind="half_weights"):
    """16-bit weights and activations; the optimizer works on fp32 masters (O2).

    Normalisation layers and rotary positions stay fp32.

    Example:
        >>> HalfWeightsConfig(float_modules=("head",)).exchange
        'half'
    """

    exchange: Literal["half", "fp32"] = "half"
    """Type of gradients on the wire where no codec applies; ``half`` sends half the bytes."""


_KINDS = ("autocast", "half_weights")


def _kind_of(value: object) -> object:
    """As ``from_kind``; for the names of other projects (O1, fp16) the error lists ours."""
    found = from_kind(value)
    kind = found.get("kind") if isinstance(found, Mapping) else None
    if isinstance(kind, str) and kind not in _KINDS:
        raise ValueError(
            f"no such kind{did_you_mean(kind, _KINDS)}; allowed: autocast (O1) or half_weights "
            "(O2), with dtype bf16 or fp16; e.g. precision: {kind: autocast, dtype: bf16}"
        )
    return found


PrecisionConfig = Annotated[AutocastConfig | HalfWeightsConfig, OneOf(_kind_of)]
"""A precision, or only its kind."""
