"""A thirty-second of the bytes: the sign of each value, and one scale for each block.

    s = mean |x|,    x' = s sign(x),    sign(0) = +1

Biased, so useful with error feedback only. Bernstein et al. "signSGD" (2018), Karimireddy et al.
(2019), and the two-sided compression of DeepSpeed's 1-bit Adam (Tang et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Generator, Tensor

from slipstream.codecs.blocks import BlockCodec

# An int64 of eight bytes that are 0 or 1, times this, has them as the bits of its highest byte, the
# first byte as the lowest bit: byte i is shifted by 56 - 7i bits, and no two products overlap.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))


@dataclass(frozen=True, slots=True)
class OneBitCodec(BlockCodec):
    """Values, a multiple of ``block`` of them, as bytes; ``block`` is a multiple of 64.

    Example:
        >>> codec = OneBitCodec(block=64)
        >>> x = torch.arange(64.0) - 31.5
        >>> codec.encode(x).numel()
        12
        >>> codec.decode(codec.encode(x), x.dtype)[[0, -1]]
        tensor([-16.,  16.])
    """

    bits: ClassVar[int] = 1
    code: ClassVar[torch.dtype] = torch.uint8
    levels: ClassVar[int] = 1
    block: int = 1024

    def _encode(self, blocks: Tensor, scales: Tensor, random: Generator | None) -> Tensor:
        shares = blocks / self.block  # divide first: a sum may overflow
        torch.sum(shares.abs_(), 1, out=scales)  # a norm by rows is slow (2.13, CPU)
        eight = (blocks >= 0).view(torch.int64)
        return eight.mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(255)

    def _steps(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        table = _signs(dtype) if codes.is_cpu else _make_signs(dtype, codes.device)
        return table.index_select(0, codes.to(torch.int32))


@cache
def _signs(dtype: torch.dtype) -> Tensor:
    """Cached on CPUs alone: on another device, a second stream might read them too early."""
    return _make_signs(dtype, torch.device("cpu"))


def _make_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight signs that each byte stands for: 256 rows."""
    byte = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (byte & 1).to(dtype).mul_(2).sub_(1)
