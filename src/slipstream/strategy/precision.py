"""Precision: which values are computed and kept in 16 bits, and by what losses are multiplied.

Never casts anything: the room ``precision`` does what these values ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from slipstream.strategy.setting import Exactness, Setting, Variant, from_kind
from slipstream.strategy.validate import did_you_mean


class AutoScale(Variant):
    """Dynamic for fp16, none for bf16, which has the range of fp32."""

    kind: Literal["auto"] = "auto"
    exactness: ClassVar[Exactness] = "reordered"


class DynamicScale(Variant):
    """The scale falls when gradients overflow, and grows after many updates in which none did.

    The defaults are those of ``torch.amp.GradScaler`` and of Apex. Paddle's are ``init 32768,
    incr_every_n 1000, decr_every_n 2, decr_ratio 0.8``.

    Example:
        >>> DynamicScale(init=2.0**15, decr_every_n=2).incr_every_n
        2000
    """

    kind: Literal["dynamic"] = "dynamic"
    exactness: ClassVar[Exactness] = "reordered"

    init: PositiveFloat = 65536.0
    """Scale of the first update."""

    incr_every_n: PositiveInt = 2000
    """Updates in a row without an overflow after which it grows."""

    decr_every_n: PositiveInt = 1
    """Updates with an overflow, since it last grew or fell or one went well, after which it
    falls."""

    incr_ratio: float = Field(default=2.0, gt=1)
    """What it is multiplied by when it grows."""

    decr_ratio: float = Field(default=0.5, gt=0, lt=1)
    """What it is multiplied by when it falls."""

    min: PositiveFloat = 1.0
    """It never falls below."""

    max: PositiveFloat = 2.0**24
    """It never grows above."""

    @model_validator(mode="after")
    def _in_range(self) -> DynamicScale:
        if not self.min <= self.init <= self.max:
            raise ValueError(
                f"init {self.init:g} lies outside min {self.min:g} to max {self.max:g}; "
                "allowed: min <= init <= max"
            )
        return self


class StaticScale(Variant):
    """The scale stays as it is; updates whose gradients overflow are skipped all the same.

    Example:
        >>> StaticScale(scale=128.0).scale
        128.0
    """

    kind: Literal["static"] = "static"
    exactness: ClassVar[Exactness] = "reordered"

    scale: PositiveFloat = Field(le=2.0**24, examples=[1024.0])  # as far as a dynamic one
    """What losses are multiplied by."""


_AnyScale = AutoScale | DynamicScale | StaticScale

LossScale = Annotated[
    _AnyScale,
    Field(discriminator="kind"),
    BeforeValidator(from_kind, json_schema_input_type=_AnyScale | Literal["auto", "dynamic"]),
]
"""A loss scale, or the kind alone of one that needs no more."""

HalfType = Literal["bf16", "fp16"]


class _Half(Variant):
    """What both ways to compute in 16 bits have in common."""

    exactness: ClassVar[Exactness] = "lossy"

    dtype: HalfType = "bf16"
    """bf16 has the range of fp32 and 8 bits of mantissa, fp16 11 bits and 6e-8 to 65504."""

    loss_scale: LossScale | None = AutoScale()
    """What losses are multiplied by, so that small gradients survive; null: nothing."""

    float_modules: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of the paths of modules that stay fp32, with all inside them."""

    emulate: bool = False
    """Accept fp16 on a CPU that has no instructions for it: hundreds of times as slow."""

    @property
    def scale(self) -> DynamicScale | StaticScale | None:
        """The loss scale that is meant.

        Example:
            >>> Autocast().scale, Autocast(dtype="fp16").scale.kind
            (None, 'dynamic')
        """
        if isinstance(self.loss_scale, AutoScale):
            return DynamicScale() if self.dtype == "fp16" else None
        return self.loss_scale


class Autocast(_Half):
    """Matrix products and convolutions compute in 16 bits, weights stay fp32 (O1).

    Example:
        >>> Autocast(dtype="fp16", float_ops=("gelu",)).kind
        'autocast'
    """

    kind: Literal["autocast"] = "autocast"

    float_ops: tuple[str, ...] = Field(default=(), strict=False)
    """Functions of torch that compute in fp32, beyond autocast's own, e.g. gelu."""

    half_ops: tuple[str, ...] = Field(default=(), strict=False)
    """Functions of torch that compute in 16 bits, e.g. softmax."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Autocast:
        if both := sorted({*self.float_ops} & {*self.half_ops}):
            raise ValueError(f"{both[0]!r} is among float_ops and half_ops; allowed: one of both")
        return self


class HalfWeights(_Half):
    """Weights and activations are 16 bits wide, the optimizer works on fp32 masters (O2).

    Normalisation layers stay fp32.

    Example:
        >>> HalfWeights(float_modules=("head",)).exchange
        'half'
    """

    kind: Literal["half_weights"] = "half_weights"

    exchange: Literal["half", "fp32"] = "half"
    """What gradients travel as where they have no codec: half takes half the bytes."""


_KINDS = ("autocast", "half_weights")


def _kind_of(value: object) -> object:
    """As ``from_kind``; says what other projects' names are called here."""
    found = from_kind(value)
    kind = found.get("kind") if isinstance(found, Mapping) else None
    if isinstance(kind, str) and kind not in _KINDS:
        raise ValueError(
            f"no such kind{did_you_mean(kind, _KINDS)}; allowed: autocast (O1) or half_weights "
            "(O2), with dtype bf16 or fp16; e.g. precision: {kind: autocast, dtype: bf16}"
        )
    return found


Precision = Annotated[
    Autocast | HalfWeights,
    Field(discriminator="kind"),
    BeforeValidator(
        _kind_of,
        json_schema_input_type=Autocast | HalfWeights | Literal["autocast", "half_weights"],
    ),
]
"""A precision, or its kind alone."""


class Compute(Setting):
    """How the device computes.

    Example:
        >>> Compute(tf32=True).active, Compute().active
        (True, False)
    """

    tf32: bool = False
    """On CUDA, fp32 products round their inputs to 10 bits of mantissa.

    So do convolutions. false: both as torch is set.
    """

    @property
    def active(self) -> bool:
        """True where something differs from what torch does by itself."""
        return self.tf32
