"""A quarter of the bytes: blocks of values as 8-bit integers, with one scale for each block.

    s = max |x| / 127,    q = round(x / s),    x' = q s

so ``|x' - x| <= s / 2`` with nearest and ``< s`` with stochastic rounding, which is unbiased:
``q = floor(x / s + u)``, u uniform in [0, 1), from a random stream of each rank's own (with the
same stream on all, errors of ranks would add up instead of averaging out).

The scheme is that of ZeRO++ (Wang et al. 2023) and Bagua's ByteGrad; QSGD (Alistarh et al. 2017)
analyses the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from slipstream.codecs.blocks import BlockCodec


@dataclass(frozen=True, slots=True)
class Int8Codec(BlockCodec):
    """Values, a multiple of ``block`` of them, as bytes.

    Example:
        >>> codec = Int8Codec(block=8)
        >>> x = torch.linspace(-1, 1, 8)
        >>> payload = codec.encode(x)
        >>> payload.dtype, payload.numel() == codec.wire_bytes(8, x.dtype) == 12
        (torch.uint8, True)
        >>> bool((codec.decode(payload, x.dtype) - x).abs().max() <= 1 / 127 / 2 + 1e-7)
        True
    """

    bits: ClassVar[int] = 8
    code: ClassVar[torch.dtype] = torch.int8
    levels: ClassVar[int] = 127
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def _encode(self, blocks: Tensor, scales: Tensor, random: Generator | None) -> Tensor:
        tiny = torch.finfo(blocks.dtype).tiny  # a block of zeros must not divide by 0
        torch.amax(blocks.abs(), 1, out=scales)  # an infinity norm by rows is slow (2.13, CPU)
        scales.div_(self.levels).clamp_(min=tiny)
        steps = blocks / scales[:, None]
        if self.rounding == "nearest":
            return steps.round_()
        shift = torch.empty_like(steps).uniform_(generator=random)
        return steps.add_(shift).floor_().clamp_(-self.levels, self.levels)

    def _steps(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes
