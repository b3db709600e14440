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
from typing import Literal

import torch

from slipstream.codecs.compressor import real_dtype

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8Codec:
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

    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload of ``numel`` values, padded to whole blocks."""
        blocks = -(-numel // self.block)
        return blocks * (self.block + real_dtype(dtype).itemsize)

    def encode(
        self,
        values: torch.Tensor,
        out: torch.Tensor | None = None,
        random: torch.Generator | None = None,
    ) -> torch.Tensor:
        """The payload: scales, then integers.

        Args:
            values: 1-D, fp32 or fp64.
            out: 1-D, uint8, of the payload's size; None: a new one.
            random: generator for stochastic rounding.
        """
        if out is None:
            size = self.wire_bytes(values.numel(), values.dtype)
            out = torch.empty(size, dtype=torch.uint8, device=values.device)
        scales, integers = self._parts(out, values.dtype)
        blocks = values.view(-1, self.block)
        tiny = torch.finfo(values.dtype).tiny  # a block of zeros must not divide by 0
        torch.amax(blocks.abs(), 1, out=scales)  # an infinity norm by rows is slow (2.13, CPU)
        scales.div_(LEVELS).clamp_(min=tiny)
        steps = blocks / scales[:, None]
        if self.rounding == "stochastic":
            shift = torch.rand(
                steps.shape, dtype=steps.dtype, device=steps.device, generator=random
            )
            steps.add_(shift).floor_().clamp_(-LEVELS, LEVELS)
        else:
            steps.round_()
        integers.copy_(steps)
        return out

    def decode(
        self, payload: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The values, in ``dtype`` (fp32 or fp64)."""
        scales, integers = self._parts(payload, dtype)
        if out is None:
            out = torch.empty(integers.numel(), dtype=dtype, device=payload.device)
        torch.mul(integers, scales[:, None], out=out.view(-1, self.block))
        return out

    def peaks(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The largest decoded magnitude of each block; not finite where a value was not."""
        scales, _ = self._parts(payload, dtype)
        return scales * LEVELS

    def _parts(
        self, payload: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = payload.numel() // (self.block + dtype.itemsize)
        scales = payload[: blocks * dtype.itemsize].view(dtype)
        return scales, payload[blocks * dtype.itemsize :].view(torch.int8).view(-1, self.block)
