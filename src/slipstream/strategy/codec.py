"""Codec settings: how gradients are compressed before they are sent. ``codecs`` implements them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from slipstream.strategy.setting import OneOf, Variant

_Part = Annotated[float, Field(gt=0, le=1)]


class CodecVariant(Variant):
    """A codec, and what others need to know of it.

    Attributes:
        summed: whether what travels is a sum that a transport takes; else it is encoded and decoded
            again on the way.
        takes_momentum: whether it applies the momentum of the optimizer itself.
    """

    summed: ClassVar[bool] = False
    takes_momentum: ClassVar[bool] = False

    @property
    def phases(self) -> tuple[tuple[int, CodecVariant | None], ...]:
        """Pairs of (first update, codec at work from there on); None: gradients travel as they are.

        Example:
            >>> OneBitConfig(start_step=9).phases == ((0, None), (9, OneBitConfig(start_step=9)))
            True
        """
        start = getattr(self, "start_step", 0)
        return ((0, None), (start, self)) if start else ((0, self),)

    @property
    def late_by(self) -> int:
        """Updates until it sends as little as it ever will."""
        return self.phases[-1][0]

    def at_once(self) -> Self:
        """The same as it is in the end, from the first update on."""
        return self.model_copy(update={"start_step": 0}) if hasattr(self, "start_step") else self

    def copies(self, ranks: int) -> float:
        """Count how many times the bytes of the gradients a rank keeps between updates.

        The error of what a rank sends, and that of the part that it sums for all.
        """
        return 1 + 1 / ranks

    def of(self, name: str) -> CodecVariant | None:
        """The codec of a parameter, by its path."""
        return self


class HalfConfig(CodecVariant, kind="half", exactness="lossy"):
    """Gradients travel and are summed as 16-bit floats.

    Example:
        >>> HalfConfig(dtype="fp16").dtype
        'fp16'
    """

    dtype: Literal["bf16", "fp16"] = "bf16"
    """bf16 has the range of fp32. fp16 is finer, but only holds 6e-8 to 65504: a smaller mean
    becomes 0, a larger one infinite. The range applies before the loss scale is divided out; with a
    loss scale, an overflow skips the update."""

    summed = True

    def copies(self, ranks: int) -> float:
        """None."""
        return 0.0


class Int8Config(CodecVariant, kind="int8", exactness="lossy"):
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

    def copies(self, ranks: int) -> float:
        """Errors, if they are fed back."""
        return super().copies(ranks) if self.error_feedback else 0.0


class Int4Config(CodecVariant, kind="int4", exactness="lossy"):
    """Values travel as 4-bit integers with one scale per block and are summed in fp32; what
    rounding leaves out is sent later.

    Example:
        >>> Int4Config().block
        64
    """

    block: int = Field(default=64, ge=8, le=65536, multiple_of=8)
    """Values that share a scale."""

    start_step: NonNegativeInt = 0
    """Updates that send values uncompressed first."""


class OneBitConfig(CodecVariant, kind="onebit", exactness="lossy"):
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


SCATTERED: tuple[type[CodecVariant], ...] = (HalfConfig, Int8Config, Int4Config, OneBitConfig)
"""Codecs that can carry a reduce-scatter: each rank gets its part of the sum alone."""


class DgcConfig(CodecVariant, kind="dgc", exactness="lossy"):
    """Only the largest values travel; the others accumulate until they are large (DGC).

    Takes over momentum and weight decay of ``torch.optim.SGD``, because DGC applies them before it
    accumulates; refuses other optimizers.

    Example:
        >>> DgcConfig(density=0.01, warmup_steps=0).density
        0.01
    """

    density: _Part = 0.001
    """Share of the values that is sent."""

    start_step: NonNegativeInt = 0
    """Updates that send gradients uncompressed first."""

    warmup_steps: NonNegativeInt = 1000
    """Updates after ``start_step`` over which the density falls."""

    warmup: tuple[_Part, ...] = Field(default=(0.25, 0.0625, 0.015625, 0.004), strict=False)
    """Densities of the warm-up, each for an equal part of it."""

    sample: _Part = 0.01
    """Share of the values sampled to estimate the threshold."""

    clip: PositiveFloat | None = None
    """Norm to which each gradient is clipped before it accumulates, divided by the square root of
    the number of ranks; null: no clipping."""

    @property
    def stages(self) -> tuple[tuple[int, float], ...]:
        """Pairs of (first update, density from there on).

        Example:
            >>> DgcConfig(density=0.01, start_step=100, warmup_steps=40, warmup=(0.2, 0.05)).stages
            ((0, 1.0), (100, 0.2), (120, 0.05), (140, 0.01))
        """
        each = self.warmup_steps / max(len(self.warmup), 1)
        begin = self.start_step
        stages = [(0, 1.0)] if begin else []
        if self.warmup_steps:
            stages += [(begin + round(i * each), share) for i, share in enumerate(self.warmup)]
        end = begin + (self.warmup_steps if self.warmup else 0)
        return (*stages, (end, self.density))

    takes_momentum = True

    @property
    def phases(self) -> tuple[tuple[int, CodecVariant | None], ...]:
        """Ever lower densities.

        Example:
            >>> dgc = DgcConfig(warmup_steps=8, warmup=(0.2, 0.1))
            >>> [(first, phase.density) for first, phase in dgc.phases]
            [(0, 0.2), (4, 0.1), (8, 0.001)]
        """
        single = {"start_step": 0, "warmup_steps": 0}
        return tuple(
            (first, self.model_copy(update={"density": density, **single}))
            for first, density in self.stages
        )

    def at_once(self) -> Self:
        """Without a warm-up."""
        return self.model_copy(update={"start_step": 0, "warmup_steps": 0})

    def copies(self, ranks: int) -> float:
        """Momentum and velocity."""
        return 2.0


class PowerSgdConfig(CodecVariant, kind="powersgd", exactness="lossy"):
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

    error_feedback: bool = True
    """Add the approximation error to the next gradients; needs as much memory as the gradients."""

    def copies(self, ranks: int) -> float:
        """Count the error, without error feedback, too: the thin matrices are kept then, and 0
        would mean that nothing is."""
        return 1.0


class TopKConfig(CodecVariant, kind="topk", exactness="lossy"):
    """The largest values of each chunk travel as 8-bit integers; the others are added to the next.

    Example:
        >>> TopKConfig(decay=0.95).keep
        64
    """

    chunk: int = Field(default=4096, ge=8, le=65536, multiple_of=8)
    """Values of which the largest are sent."""

    keep: int = Field(default=64, ge=1)
    """Values of a chunk that are sent."""

    decay: _Part = 1.0
    """What is left, from exchange to exchange, of a value that is not sent. Below 1 it works as
    momentum: with ``local`` set ``momentum: 0`` beside it."""

    start_step: NonNegativeInt = 0
    """Updates that send values uncompressed first."""

    @model_validator(mode="after")
    def _keeps_some(self) -> TopKConfig:
        if self.keep > self.chunk:
            raise ValueError(f"keep {self.keep} is more than chunk {self.chunk}; allowed: less")
        return self

    def copies(self, ranks: int) -> float:
        """The error of what a rank sends."""
        return 1.0


PlainCodecConfig = (
    HalfConfig | Int8Config | Int4Config | OneBitConfig | TopKConfig | DgcConfig | PowerSgdConfig
)
OneCodecConfig = Annotated[PlainCodecConfig, OneOf(family=CodecVariant)]
"""One codec, or only its kind where the defaults do."""
