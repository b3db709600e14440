"""From the wish to a coder: which codec a strategy's setting means, and what it puts on the wire.

Never encodes anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from slipstream.codecs.compressor import Coder, Ranks, real_dtype
from slipstream.codecs.dgc import DgcCodec, DgcCoder, Momentum
from slipstream.codecs.half import HalfCodec
from slipstream.codecs.int8 import Int8Codec
from slipstream.codecs.onebit import OneBitCodec
from slipstream.codecs.powersgd import PowerSgdCodec, PowerSgdCoder
from slipstream.codecs.two_phase import TwoPhaseCoder
from slipstream.strategy import Dgc, Half, Int8, OneBit, PlainCodec, PowerSgd


def make_coder(
    wish: Int8 | OneBit | Dgc | PowerSgd,
    parameters: Sequence[torch.Tensor],
    ranks: Ranks,
    *,
    momenta: Sequence[Momentum] = (),
    num_riders: int = 0,
    seed: int = 0,
) -> Coder:
    """The coder of a bucket that holds the gradients of ``parameters``, all of one dtype.

    Args:
        wish: what the strategy says; 16-bit floats need no coder.
        parameters: slot by slot; complex ones count as twice as many real values.
        ranks: who takes part.
        momenta: what DGC is to do for the optimizer, slot by slot.
        num_riders: flags that travel along.
        seed: of random streams; the same on all ranks, another one for each bucket.
    """
    shapes = [real_shape(p) for p in parameters]
    dtype, device = parameters[0].dtype, parameters[0].device
    match wish:
        case Int8():
            return TwoPhaseCoder(
                Int8Codec(wish.block, wish.rounding),
                [prod(shape) for shape in shapes],
                dtype,
                ranks,
                device,
                feedback=wish.error_feedback,
                num_riders=num_riders,
                seed=seed,
            )
        case OneBit():
            return TwoPhaseCoder(
                OneBitCodec(wish.block),
                [prod(shape) for shape in shapes],
                dtype,
                ranks,
                device,
                feedback=True,
                start_step=wish.start_step,
                num_riders=num_riders,
                seed=seed,
            )
        case Dgc():
            return DgcCoder(
                DgcCodec(wish.density, wish.sample),
                shapes,
                dtype,
                ranks,
                device,
                momenta=momenta or [Momentum(0.0)] * len(shapes),
                stages=wish.stages,
                clip=wish.clip,
                seed=seed,
            )
        case PowerSgd():
            return PowerSgdCoder(
                PowerSgdCodec(wish.rank, wish.min_compression_rate),
                shapes,
                dtype,
                ranks,
                device,
                start_step=wish.start_step,
                warm_start=wish.warm_start,
                feedback=wish.error_feedback,
                num_riders=num_riders,
                seed=seed,
            )


def wire_bytes(wish: PlainCodec | None, parameter: torch.Tensor) -> int:
    """Bytes that stand for the gradient of a parameter on the wire, once it is compressed.

    Example:
        >>> weight = torch.zeros(64, 64)
        >>> wire_bytes(None, weight), wire_bytes(Half(), weight), wire_bytes(Int8(), weight)
        (16384, 8192, 4160)
    """
    numel, dtype, shape = parameter.numel(), parameter.dtype, real_shape(parameter)
    match wish:
        case None:
            return parameter.nbytes
        case Half():
            return min(HalfCodec(wish.dtype).wire_bytes(numel, dtype), parameter.nbytes)
        case Int8():
            return Int8Codec(wish.block).wire_bytes(prod(shape), dtype)
        case OneBit():
            return OneBitCodec(wish.block).wire_bytes(prod(shape), dtype)
        case Dgc() if len(shape) > 1:
            return DgcCodec(wish.density).wire_bytes(prod(shape), dtype)
        case PowerSgd():
            values = PowerSgdCodec(wish.rank, wish.min_compression_rate).wire_values(shape)
            return values * real_dtype(dtype).itemsize
        case _:
            return parameter.nbytes


def real_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the values that are coded: complex numbers are pairs of real ones."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
