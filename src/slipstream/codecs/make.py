"""From a strategy's codec to a compressor, and to the bytes that it puts on the wire.

Never encodes anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from slipstream.codecs.compressor import Compressor, Ranks, real_dtype
from slipstream.codecs.dgc import DgcCodec, DgcCompressor, Momentum
from slipstream.codecs.half import HalfCodec, HalfCompressor
from slipstream.codecs.int8 import Int8Codec
from slipstream.codecs.onebit import OneBitCodec
from slipstream.codecs.powersgd import PowerSgdCodec, PowerSgdCompressor
from slipstream.codecs.two_phase import TwoPhaseCompressor
from slipstream.strategy import (
    DgcConfig,
    HalfConfig,
    Int8Config,
    OneBitConfig,
    PlainCodecConfig,
    PowerSgdConfig,
)


def make_compressor(
    config: PlainCodecConfig,
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
    shapes = [real_shape(p) for p in parameters]
    bucket = shapes, parameters[0].dtype, ranks, parameters[0].device
    common: dict[str, Any] = {"num_flags": num_flags, "seed": seed}
    match config:
        case HalfConfig():
            return HalfCompressor(HalfCodec(config.dtype), *bucket, **common)
        case Int8Config():
            int8 = Int8Codec(config.block, config.rounding)
            return TwoPhaseCompressor(int8, *bucket, feedback=config.error_feedback, **common)
        case OneBitConfig():
            onebit, start_step = OneBitCodec(config.block), config.start_step
            return TwoPhaseCompressor(
                onebit, *bucket, feedback=True, start_step=start_step, **common
            )
        case DgcConfig():
            return DgcCompressor(
                DgcCodec(config.density, config.sample),
                *bucket,
                momenta=momenta or [Momentum(0.0)] * len(shapes),
                stages=config.stages,
                clip=config.clip,
                **common,
            )
        case PowerSgdConfig():
            return PowerSgdCompressor(
                PowerSgdCodec(config.rank, config.min_compression_rate),
                *bucket,
                start_step=config.start_step,
                warm_start=config.warm_start,
                feedback=config.error_feedback,
                **common,
            )


def wire_bytes(config: PlainCodecConfig | None, parameter: torch.Tensor, ranks: int = 2) -> int:
    """Bytes of the compressed gradient of a parameter: of a plain sum that takes the network as
    long. What is gathered, not summed, comes from every one of ``ranks`` instead of twice.

    Example:
        >>> weight = torch.zeros(64, 64)
        >>> [wire_bytes(codec, weight) for codec in (None, HalfConfig(), Int8Config())]
        [16384, 8192, 4160]
    """
    numel, dtype, shape = parameter.numel(), parameter.dtype, real_shape(parameter)
    match config:
        case HalfConfig():
            return min(HalfCodec(config.dtype).wire_bytes(numel, dtype), parameter.nbytes)
        case Int8Config():
            return Int8Codec(config.block).wire_bytes(prod(shape), dtype)
        case OneBitConfig():
            return OneBitCodec(config.block).wire_bytes(prod(shape), dtype)
        case DgcConfig() if len(shape) > 1 and config.density < 1:
            return DgcCodec(config.density).wire_bytes(prod(shape), dtype) * ranks // 2
        case PowerSgdConfig():
            values = PowerSgdCodec(config.rank, config.min_compression_rate).wire_values(shape)
            return values * real_dtype(dtype).itemsize
        case _:
            return parameter.nbytes


def real_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the values that are compressed: complex numbers are pairs of real ones."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
