"""Codec settings: how gradients are compressed before they are sent. ``codecs`` implements them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator

from slipstream.strategy.setting import OneOf, Setting, Variant

_Share = Annotated[float, Field(gt=0, le=1)]


class HalfConfig(Variant, kind="half", exactness="lossy"):
    """Gradients travel and are summed as 16-bit floats.

    Example:
        >>> HalfConfig(dtype="fp16").dtype
        'fp16'
    """

    dtype: Literal["bf16", "fp16"] = "bf16"
    """bf16 has the range of fp32. fp16 is finer, but only holds 6e-8 to 65504: a smaller mean
    becomes 0, a larger one infinite. The range applies before the loss scale is divided out; with a
    loss scale, an overflow skips the update."""


class Int8Config(Variant, kind="int8", exactness="lossy"):
    """Gradients travel as 8-bit integers with one scale per block and are summed in fp32.

    Example:
        >>> Int8Config(rounding="stochastic").block
        256
    """

    block: int = Field(default=256, ge=8, le=65536, multiple_of=8)
    """Values that share a scale."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Stochastic rounding is unbiased; nearest has the smaller error each time."""

    error_feedback: bool = False
    """Add the rounding error to the next gradients; needs as much memory as the gradients."""


class OneBitConfig(Variant, kind="onebit", exactness="lossy"):
    """Gradients travel as signs with one scale per block; error feedback sends the rest later.

    The first ``start_step`` updates are dense, as in 1-bit Adam (Tang et al. 2021): an optimizer
    that scales gradients by their history and has none yet moves parameters too far on signs alone.

    Example:
        >>> OneBitConfig().block
        1024
    """

    block: int = Field(default=1024, ge=64, le=65536, multiple_of=64)
    """Values that share a scale."""

    start_step: NonNegativeInt = 1000
    """Updates that send gradients uncompressed first: early gradients change too fast."""


class DgcConfig(Variant, kind="dgc", exactness="lossy"):
    """Only the largest values travel; the others accumulate until they are large (DGC).

    Takes over momentum and weight decay of ``torch.optim.SGD``, because DGC applies them before it
    accumulates; refuses other optimizers.

    Example:
        >>> DgcConfig(density=0.01, warmup_steps=0).density
        0.01
    """

    density: _Share = 0.001
    """Share of the values that is sent."""

    dense_steps: NonNegativeInt = 0
    """Updates that send everything first."""

    warmup_steps: NonNegativeInt = 1000
    """Updates after ``dense_steps`` over which the density falls."""

    warmup: tuple[_Share, ...] = Field(default=(0.25, 0.0625, 0.015625, 0.004), strict=False)
    """Densities of the warm-up, each for an equal part of it."""

    sample: _Share = 0.01
    """Share of the values sampled to estimate the threshold."""

    clip: PositiveFloat | None = None
    """Norm to which each gradient is clipped before it accumulates, divided by the square root of
    the number of ranks; null: no clipping."""

    @property
    def stages(self) -> tuple[tuple[int, float], ...]:
        """Pairs of (first update, density from there on).

        Example:
            >>> DgcConfig(density=0.01, dense_steps=100, warmup_steps=40, warmup=(0.2, 0.05)).stages
            ((0, 1.0), (100, 0.2), (120, 0.05), (140, 0.01))
        """
        each = self.warmup_steps / max(len(self.warmup), 1)
        begin = self.dense_steps
        stages = [(0, 1.0)] if begin else []
        if self.warmup_steps:
            stages += [(begin + round(i * each), share) for i, share in enumerate(self.warmup)]
        end = begin + (self.warmup_steps if self.warmup else 0)
        return (*stages, (end, self.density))


class PowerSgdConfig(Variant, kind="powersgd", exactness="lossy"):
    """Gradients travel as products of two thin matrices; error feedback sends the rest later.

    Example:
        >>> PowerSgdConfig(rank=2).start_step
        1000
    """

    rank: int = Field(default=4, ge=1)
    """Columns of the thin matrices."""

    start_step: NonNegativeInt = 1000
    """Updates that send gradients uncompressed first."""

    min_compression_rate: float = Field(default=2.0, ge=1)
    """A gradient that shrinks by less than this factor travels uncompressed."""

    warm_start: bool = True
    """Start from the matrices of the last update."""

    error_feedback: bool = True
    """Add the approximation error to the next gradients; needs as much memory as the gradients."""


PlainCodecConfig = HalfConfig | Int8Config | OneBitConfig | DgcConfig | PowerSgdConfig
_OneCodec = Annotated[PlainCodecConfig, OneOf()]


class CodecRuleConfig(Setting):
    """The codec of parameters whose path matches a pattern.

    Example:
        >>> CodecRuleConfig(match="*.bias", codec=None).match
        '*.bias'
    """

    match: str = Field(min_length=1, examples=["*.bias"])
    """Pattern of parameter paths with ``*`` and ``?`` as wildcards."""

    codec: _OneCodec | None = None
    """Their codec; null: none."""


class ByNameConfig(Variant, kind="by_name", exactness="lossy"):
    """Each parameter gets the codec of the first rule that matches its path, else none.

    ``accelerate()`` warns about a rule that matches no trainable parameter.

    Example:
        >>> rules = CodecRuleConfig(match="*.bias"), CodecRuleConfig(match="*", codec=HalfConfig())
        >>> by_name = ByNameConfig(rules=rules)
        >>> by_name.of("head.bias"), by_name.of("head.weight").dtype
        (None, 'bf16')
    """

    rules: tuple[CodecRuleConfig, ...] = Field(min_length=1, strict=False)
    """First match wins."""

    def of(self, name: str) -> PlainCodecConfig | None:
        """The codec of a parameter, by its path."""
        return next((r.codec for r in self.rules if fnmatchcase(name, r.match)), None)


class AdaptiveConfig(Variant, kind="adaptive", exactness="lossy"):
    """A codec, used only for segments where it saves more time on the wire than it costs.

    Both times are measured on the live ranks before the first update.

    Example:
        >>> AdaptiveConfig(codec="int8").codec.kind
        'int8'
    """

    codec: _OneCodec = HalfConfig()
    """The codec for segments where it pays."""

    @field_validator("codec")
    @classmethod
    def _not_dgc(cls, codec: PlainCodecConfig) -> PlainCodecConfig:
        if isinstance(codec, DgcConfig):
            raise ValueError(
                "dgc takes over the momentum of all parameters, even where it does not pay; "
                "allowed: half, int8, onebit, powersgd, or dgc without adaptive"
            )
        return codec


CodecConfig = Annotated[PlainCodecConfig | ByNameConfig | AdaptiveConfig, OneOf()]
"""A codec, or only its kind where the defaults do: ``half`` for ``{kind: half}``."""


def phases(codec: PlainCodecConfig) -> tuple[tuple[int, PlainCodecConfig | None], ...]:
    """Pairs of (first update, codec at work from there on); None: gradients travel as they are.

    Example:
        >>> phases(OneBitConfig(start_step=100)) == ((0, None), (100, OneBitConfig(start_step=100)))
        True
        >>> dgc = DgcConfig(warmup_steps=8, warmup=(0.2, 0.1))
        >>> [(first, phase.density) for first, phase in phases(dgc)]
        [(0, 0.2), (4, 0.1), (8, 0.001)]
    """
    if isinstance(codec, DgcConfig):
        single = {"dense_steps": 0, "warmup_steps": 0}
        return tuple(
            (first, codec.model_copy(update={"density": density, **single}))
            for first, density in codec.stages
        )
    start = codec.start_step if isinstance(codec, OneBitConfig | PowerSgdConfig) else 0
    return ((0, None), (start, codec)) if start else ((0, codec),)


def phase_of(codec: PlainCodecConfig | None, step: int) -> PlainCodecConfig | None:
    """The codec at work after ``step`` updates.

    Example:
        >>> phase_of(PowerSgdConfig(), 999), phase_of(PowerSgdConfig(), 1000).kind
        (None, 'powersgd')
    """
    at_work = None
    for first, phase in () if codec is None else phases(codec):
        at_work = phase if first <= step else at_work
    return at_work


def late_by(codec: PlainCodecConfig | ByNameConfig | AdaptiveConfig | None) -> int:
    """Updates until the codec sends as little as it ever will.

    Example:
        >>> late_by(Int8Config()), late_by(DgcConfig(dense_steps=5))
        (0, 1005)
    """
    match codec:
        case None:
            return 0
        case ByNameConfig():
            return max(late_by(rule.codec) for rule in codec.rules)
        case AdaptiveConfig():
            return late_by(codec.codec)
    return phases(codec)[-1][0]


def at_once(
    codec: PlainCodecConfig | ByNameConfig | AdaptiveConfig | None,
) -> PlainCodecConfig | ByNameConfig | AdaptiveConfig | None:
    """The codec as it is in the end, from the first update on.

    Example:
        >>> at_once(OneBitConfig(block=64)) == OneBitConfig(block=64, start_step=0)
        True
    """
    match codec:
        case ByNameConfig():
            rules = [rule.model_copy(update={"codec": at_once(rule.codec)}) for rule in codec.rules]
            return codec.model_copy(update={"rules": tuple(rules)})
        case AdaptiveConfig():
            return codec.model_copy(update={"codec": at_once(codec.codec)})
        case OneBitConfig() | PowerSgdConfig():
            return codec.model_copy(update={"start_step": 0})
        case DgcConfig():
            return phases(codec)[-1][1]
    return codec


def codec_of(
    codec: PlainCodecConfig | ByNameConfig | AdaptiveConfig | None, name: str
) -> PlainCodecConfig | None:
    """The codec of a parameter's gradient; for ``adaptive``, the codec used where it pays.

    Example:
        >>> codec_of(AdaptiveConfig(codec="int8"), "head.weight").kind
        'int8'
    """
    if isinstance(codec, ByNameConfig):
        return codec.of(name)
    return codec.codec if isinstance(codec, AdaptiveConfig) else codec


def keeps_state(codec: PlainCodecConfig | ByNameConfig | AdaptiveConfig | None) -> bool:
    """Whether the codec keeps state between updates, which differs from rank to rank.

    Example:
        >>> keeps_state(HalfConfig()), keeps_state(Int8Config()), keeps_state(OneBitConfig())
        (False, False, True)
    """
    match codec:
        case Int8Config():
            return codec.error_feedback
        case ByNameConfig():
            return any(keeps_state(rule.codec) for rule in codec.rules)
        case AdaptiveConfig():
            return keeps_state(codec.codec)
    return not isinstance(codec, HalfConfig | None)
