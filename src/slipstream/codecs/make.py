"""From a strategy's codec to a compressor, and to the bytes that it puts on the wire.

Never encodes anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from slipstream.codecs.compressor import Compressor, Ranks, real_dtype
from slipstream.codecs.dgc import DgcCodec, DgcCompressor, Momentum
from slipstream.codecs.half import HalfCodec, HalfCompressor
from slipstream.codecs.int4 import Int4Codec
from slipstream.codecs.int8 import Int8Codec
from slipstream.codecs.onebit import OneBitCodec
from slipstream.codecs.powersgd import PowerSgdCodec, PowerSgdCompressor
from slipstream.codecs.topk import TopKCodec, TopKCompressor
from slipstream.codecs.two_phase import TwoPhaseCompressor
from slipstream.strategy import (
    CodecVariant,
    DgcConfig,
    HalfConfig,
    Int4Config,
    Int8Config,
    OneBitConfig,
    PowerSgdConfig,
    TopKConfig,
)


class CompressorBucket(NamedTuple):
    """A bucket that gets a compressor: gradients of one dtype, slot by slot.

    Attributes:
        shapes: complex numbers count as pairs of real ones.
        dtype, device: of the gradients.
        ranks: that take part.
        momenta: that a codec applies for the optimizer, slot by slot.
        common: arguments of every compressor.
    """

    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    ranks: Ranks
    device: torch.device
    momenta: Sequence[Momentum]
    common: Mapping[str, Any]

    def compressor(
        self, made: Callable[..., Compressor], codec: Any, **settings: Any
    ) -> Compressor:
        """One of this class for the bucket."""
        of_bucket = self.shapes, self.dtype, self.ranks, self.device
        return made(codec, *of_bucket, **settings, **self.common)


class Codec(NamedTuple):
    """A kind of codec: its constructor, and the bytes it sends.

    Attributes:
        compressor: makes one for a bucket.
        wire_bytes: of a gradient of so many real values in this shape, of this dtype, on so many
            ranks; None: it travels as it is.
    """

    compressor: Callable[[Any, CompressorBucket], Compressor]
    wire_bytes: Callable[[Any, tuple[int, ...], torch.dtype, int], int | None]


def _half(config: HalfConfig, bucket: CompressorBucket) -> Compressor:
    return bucket.compressor(HalfCompressor, HalfCodec(config.dtype))


def _half_bytes(
    config: HalfConfig, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> int | None:
    num_bytes = prod(shape) * 2  # of a complex number's parts, too
    return num_bytes if num_bytes < prod(shape) * real_dtype(dtype).itemsize else None


def _int8(config: Int8Config, bucket: CompressorBucket) -> Compressor:
    codec = Int8Codec(config.block, config.rounding)
    return bucket.compressor(TwoPhaseCompressor, codec, feedback=config.error_feedback)


def _int4(config: Int4Config, bucket: CompressorBucket) -> Compressor:
    settings = {"feedback": True, "start_step": config.start_step}
    return bucket.compressor(TwoPhaseCompressor, Int4Codec(config.block), **settings)


def _onebit(config: OneBitConfig, bucket: CompressorBucket) -> Compressor:
    settings = {"feedback": True, "start_step": config.start_step}
    return bucket.compressor(TwoPhaseCompressor, OneBitCodec(config.block), **settings)


def _topk(config: TopKConfig, bucket: CompressorBucket) -> Compressor:
    settings = {"decay": config.decay, "start_step": config.start_step}
    return bucket.compressor(TopKCompressor, TopKCodec(config.chunk, config.keep), **settings)


def _topk_bytes(config: TopKConfig, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> int:
    """Count bytes of a part of a bucket: what is gathered comes from every rank, as of DGC."""
    row = TopKCodec(config.chunk, config.keep).wire_bytes(1)
    return -(-prod(shape) * row // config.chunk) * ranks // 2


def _dgc(config: DgcConfig, bucket: CompressorBucket) -> Compressor:
    momenta = bucket.momenta or [Momentum(0.0)] * len(bucket.shapes)
    settings = {"momenta": momenta, "stages": config.stages, "clip": config.clip}
    codec = DgcCodec(config.density, config.sample)
    return bucket.compressor(DgcCompressor, codec, **settings)


def _dgc_bytes(
    config: DgcConfig, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> int | None:
    """Count bytes of DGC: gathered values come from every rank, where sums come twice."""
    if len(shape) < 2 or config.density == 1:
        return None
    return DgcCodec(config.density).wire_bytes(prod(shape), dtype) * ranks // 2


def _powersgd(config: PowerSgdConfig, bucket: CompressorBucket) -> Compressor:
    codec = PowerSgdCodec(config.rank, config.min_compression_rate)
    settings = {"start_step": config.start_step, "feedback": config.error_feedback}
    return bucket.compressor(PowerSgdCompressor, codec, **settings)


def _powersgd_bytes(
    config: PowerSgdConfig, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> int:
    codec = PowerSgdCodec(config.rank, config.min_compression_rate)
    return codec.wire_values(shape) * real_dtype(dtype).itemsize


CODECS: dict[type[CodecVariant], Codec] = {
    HalfConfig: Codec(_half, _half_bytes),
    Int8Config: Codec(
        _int8, lambda c, shape, dtype, _: Int8Codec(c.block).wire_bytes(prod(shape), dtype)
    ),
    Int4Config: Codec(
        _int4, lambda c, shape, dtype, _: Int4Codec(c.block).wire_bytes(prod(shape), dtype)
    ),
    OneBitConfig: Codec(
        _onebit, lambda c, shape, dtype, _: OneBitCodec(c.block).wire_bytes(prod(shape), dtype)
    ),
    TopKConfig: Codec(_topk, _topk_bytes),
    DgcConfig: Codec(_dgc, _dgc_bytes),
    PowerSgdConfig: Codec(_powersgd, _powersgd_bytes),
}
"""By type of the strategy's codec; one that is added, here or elsewhere, is a row."""


def make_compressor(
    config: CodecVariant,
    parameters: Sequence[torch.Tensor],
    ranks: Ranks,
    *,
    momenta: Sequence[Momentum] = (),
    num_flags: int = 0,
    seed: int = 0,
) -> Compressor:
    """The compressor of a bucket that holds the gradients of ``parameters``, all of one dtype.

    Args:
        config: of the strategy.
        parameters: slot by slot; complex ones count as twice as many real values.
        ranks: that take part.
        momenta: that DGC applies for the optimizer, slot by slot.
        num_flags: flags that travel along.
        seed: of random streams; the same on all ranks, another one for each bucket.
    """
    first, shapes = parameters[0], [real_shape(p) for p in parameters]
    common = {"num_flags": num_flags, "seed": seed}
    bucket = CompressorBucket(shapes, first.dtype, ranks, first.device, momenta, common)
    return CODECS[type(config)].compressor(config, bucket)


def wire_bytes(config: CodecVariant | None, parameter: torch.Tensor, ranks: int = 2) -> int:
    """Bytes of the compressed gradient of a parameter: of a plain sum that takes the network as
    long. What is gathered, not summed, comes from every one of ``ranks`` instead of twice.

    Example:
        >>> weight = torch.zeros(64, 64)
        >>> [wire_bytes(codec, weight) for codec in (None, HalfConfig(), Int8Config())]
        [16384, 8192, 4160]
    """
    if config is None:
        return parameter.nbytes
    shape, dtype = real_shape(parameter), parameter.dtype
    num_bytes = CODECS[type(config)].wire_bytes(config, shape, dtype, ranks)
    return parameter.nbytes if num_bytes is None else num_bytes


def real_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the values that are compressed: complex numbers are pairs of real ones."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
