"""An eighth of the bytes: blocks of values as 4-bit integers, with one scale for each block.

    s = max |x| / 7,    q = round(x / s),    x' = q s

so ``|x' - x| <= s / 2``. Two values share a byte, as ``q + 8``, the first in its low half. Changes
of parameters that meet rarely survive so few bits (Streaming DiLoCo, Douillard et al. 2025, sends
them as 4-bit floats); error feedback sends later what rounding has left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from slipstream.codecs.blocks import BlockCodec

_ZERO = 8  # the code of 0


@dataclass(frozen=True, slots=True)
class Int4Codec(BlockCodec):
    """Values, a multiple of ``block`` of them, as bytes.

    Example:
        >>> codec = Int4Codec(block=8)
        >>> x = torch.linspace(-1, 1, 8)
        >>> payload = codec.encode(x)
        >>> payload.numel() == codec.wire_bytes(8, x.dtype) == 8
        True
        >>> bool((codec.decode(payload, x.dtype) - x).abs().max() <= 1 / 7 / 2 + 1e-7)
        True
    """

    bits: ClassVar[int] = 4
    code: ClassVar[torch.dtype] = torch.uint8
    levels: ClassVar[int] = 7
    block: int = 64

    def _encode(self, blocks: Tensor, scales: Tensor, random: Generator | None) -> Tensor:
        tiny = torch.finfo(blocks.dtype).tiny  # a block of zeros must not divide by 0
        torch.amax(blocks.abs(), 1, out=scales)
        scales.div_(self.levels).clamp_(min=tiny)
        steps = (blocks / scales[:, None]).round_().clamp_(-self.levels, self.levels)
        codes = steps.nan_to_num_().add_(_ZERO).to(torch.uint8)
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    def _steps(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        pairs = torch.stack([codes & 15, codes >> 4], -1)
        return pairs.to(dtype).sub_(_ZERO)
