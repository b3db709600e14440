"""Base of int8 and 1-bit: blocks of values, each encoded by itself with a scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from slipstream.codecs.compressor import real_dtype


@dataclass(frozen=True, slots=True)
class BlockCodec(ABC):
    """Values, a multiple of ``block`` of them, as bytes: the scales of all blocks, then codes.

    Attributes:
        bits: of the code of one value.
        code: dtype of codes.
        levels: the largest multiple of the scale that a code stands for.
    """

    bits: ClassVar[int]
    code: ClassVar[torch.dtype]
    levels: ClassVar[int]
    block: int

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload of ``numel`` values, padded to whole blocks."""
        return -(-numel // self.block) * (self.block * self.bits // 8 + real_dtype(dtype).itemsize)

    def encode(
        self, values: Tensor, out: Tensor | None = None, random: Generator | None = None
    ) -> Tensor:
        """The payload.

        Args:
            values: 1-D, fp32 or fp64.
            out: 1-D, uint8, of the payload's size; None: a new one.
            random: generator for stochastic rounding.
        """
        if out is None:
            size = self.wire_bytes(values.numel(), values.dtype)
            out = torch.empty(size, dtype=torch.uint8, device=values.device)
        scales, codes = self._parts(out, values.dtype)
        codes.copy_(self._encode(values.view(-1, self.block), scales, random).flatten())
        return out

    def decode(self, payload: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The values, in ``dtype`` (fp32 or fp64)."""
        scales, codes = self._parts(payload, dtype)
        if out is None:
            size = codes.numel() * 8 // self.bits
            out = torch.empty(size, dtype=dtype, device=payload.device)
        steps = self._steps(codes, dtype).view(-1, self.block)
        torch.mul(steps, scales[:, None], out=out.view(-1, self.block))
        return out

    def peaks(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """The largest decoded magnitude of each block; not finite where a value was not."""
        return self._parts(payload, dtype)[0] * self.levels

    @abstractmethod
    def _encode(self, blocks: Tensor, scales: Tensor, random: Generator | None) -> Tensor:
        """Codes of blocks, one a row, in any dtype; fills ``scales``."""

    @abstractmethod
    def _steps(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The multiples of the scale that ``codes`` stand for."""

    def _parts(self, payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales and codes, views of the payload."""
        border = payload.numel() // self.wire_bytes(self.block, dtype) * dtype.itemsize
        return payload[:border].view(dtype), payload[border:].view(self.code)
