"""A thirty-second of the bytes: the sign of each value, and one scale for each block.

    s = mean |x|,    x' = s sign(x),    sign(0) = +1

Biased, so useful with error feedback only. Bernstein et al. "signSGD" (2018), Karimireddy et al.
(2019), and the two-sided compression of DeepSpeed's 1-bit Adam (Tang et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from slipstream.codecs.compressor import real_dtype

# An int64 of eight bytes that are 0 or 1, times this, has them as the bits of its highest byte, the
# first byte as the lowest bit: byte i is shifted by 56 - 7i bits, and no two products overlap.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))


@dataclass(frozen=True, slots=True)
class OneBitCodec:
    """Values, a multiple of ``block`` of them, as bytes; ``block`` is a multiple of 64.

    Example:
        >>> codec = OneBitCodec(block=64)
        >>> x = torch.arange(64.0) - 31.5
        >>> codec.encode(x).numel()
        12
        >>> codec.decode(codec.encode(x), x.dtype)[[0, -1]]
        tensor([-16.,  16.])
    """

    block: int = 1024

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload of ``numel`` values, padded to whole blocks."""
        blocks = -(-numel // self.block)
        return blocks * (self.block // 8 + real_dtype(dtype).itemsize)

    def encode(
        self,
        values: torch.Tensor,
        out: torch.Tensor | None = None,
        random: torch.Generator | None = None,
    ) -> torch.Tensor:
        """The payload: scales, then bits; the arguments are those of ``Int8Codec.encode``."""
        if out is None:
            size = self.wire_bytes(values.numel(), values.dtype)
            out = torch.empty(size, dtype=torch.uint8, device=values.device)
        scales, bits = self._parts(out, values.dtype)
        shares = values.view(-1, self.block) / self.block  # divide first: a sum may overflow
        torch.sum(shares.abs_(), 1, out=scales)  # a norm by rows is slow (2.13, CPU)
        eight = (values >= 0).view(torch.int64)
        bits.copy_(eight.mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(255))
        return out

    def decode(
        self, payload: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The values, in ``dtype`` (fp32 or fp64)."""
        scales, bits = self._parts(payload, dtype)
        if out is None:
            out = torch.empty(bits.numel() * 8, dtype=dtype, device=payload.device)
        table = _signs(dtype) if payload.is_cpu else _make_signs(dtype, payload.device)
        signs = table.index_select(0, bits.to(torch.int32))
        torch.mul(signs.view(-1, self.block), scales[:, None], out=out.view(-1, self.block))
        return out

    def peaks(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The decoded magnitude of each block; not finite where a value was not."""
        scales, _ = self._parts(payload, dtype)
        return scales

    def _parts(
        self, payload: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = payload.numel() // (self.block // 8 + dtype.itemsize)
        return payload[: blocks * dtype.itemsize].view(dtype), payload[blocks * dtype.itemsize :]


@cache
def _signs(dtype: torch.dtype) -> torch.Tensor:
    """Cached on CPUs alone: on another device, a second stream might read them too early."""
    return _make_signs(dtype, torch.device("cpu"))


def _make_signs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The eight signs that each byte stands for: 256 rows."""
    byte = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (byte & 1).to(dtype).mul_(2).sub_(1)
