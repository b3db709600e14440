"""Half the bytes: gradients travel as bf16 or fp16 and are summed in it.

Gradients are divided by the number of contributions *before* they are cast, so a sum of fp16 values
overflows only where the mean itself would. bf16 keeps the range of fp32 and 8 bits of the
mantissa, fp16 11 bits and a range of 6e-8 to 65504. As torch's ``fp16_compress_hook`` does.

Where all ranks exchange alike, the flat tensor of a bucket is of that dtype, and no compressor is
needed. Between hosts the compressor casts what ranks of a host have summed.

Exactness: lossy: each rank rounds once when it casts, and each addition rounds. No state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from slipstream.codecs.compressor import Compressor, SlotState, any_infinite
from slipstream.transport.requests import AllReduce, ExchangeSteps


@dataclass(frozen=True, slots=True)
class HalfCodec:
    """Values of 32 or more bits as 16.

    Example:
        >>> codec = HalfCodec("bf16")
        >>> codec.encode(torch.tensor([1.0, 1 / 3])).to(torch.float32)
        tensor([1.0000, 0.3340])
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype that travels."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float16

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload, of the same shape; complex values get an axis of two."""
        real = torch.view_as_real(values) if values.is_complex() else values
        return real.to(self.wire_dtype)


class HalfCompressor(Compressor):
    """One all-reduce of 16-bit floats, flags included; keeps nothing."""

    codec: HalfCodec

    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> ExchangeSteps:
        payload = torch.cat([self.codec.encode(values), flags.to(self.codec.wire_dtype)])
        yield AllReduce(payload)
        values.copy_(payload[: len(values)])
        flags.copy_(payload[len(values) :] > 0)
        flags[-1:] |= any_infinite(payload)

    def forget(self, slots: Sequence[int]) -> None:
        """There is no state."""

    def state(self) -> list[dict[str, torch.Tensor]]:
        return [{} for _ in self.slots]

    def load(self, states: Sequence[SlotState]) -> None:
        """There is no state."""
