"""One value of 64, and no outer momentum: the largest of each chunk, with error feedback.

    a_t = x_t + decay e_t,    sent_t = the ``keep`` largest of each chunk of a_t, in 8 bits
    e_(t+1) = a_t - sent_t

Every rank gathers what all have sent, and adds it up in rank order. With ``decay`` 1 nothing is
lost, only delayed; below it, what is not sent fades as momentum does, and takes its place:
SparseLoCo (Sarfi et al. 2025, https://arxiv.org/abs/2508.15706) sends changes of parameters so,
64 of 4,096 values with a decay of 0.95.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from slipstream.codecs.compressor import Compressor, SlotState, any_infinite, exchange_dense
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllGather, ExchangeSteps

LEVELS = 127


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """Chunks of values as the largest of each: a scale, places in the chunk, and 8-bit codes.

    Example:
        >>> codec = TopKCodec(chunk=8, keep=2)
        >>> x = torch.tensor([[0.0, 3, 0, 0, -6, 0, 1, 0]])
        >>> codec.decode(codec.encode(x), torch.float32).round()
        tensor([[ 0.,  3.,  0.,  0., -6.,  0.,  0.,  0.]])
    """

    chunk: int = 4096
    keep: int = 64

    def wire_bytes(self, chunks: int) -> int:
        """Bytes of the payload of so many chunks."""
        return chunks * (4 + 3 * self.keep)

    def encode(self, chunks: Tensor) -> Tensor:
        """The payload: scales, places and codes.

        Args:
            chunks: a chunk a row, of a floating type.
        """
        places = chunks.abs().topk(self.keep, 1, sorted=False).indices
        values = chunks.gather(1, places).float()
        tiny = torch.finfo(torch.float32).tiny  # a chunk of zeros must not divide by 0
        scales = values.abs().amax(1).div_(LEVELS).clamp_(min=tiny)
        codes = (values / scales[:, None]).round_().nan_to_num_().to(torch.int8)
        parts = (scales, places.to(torch.int16), codes)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])

    def decode(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """The chunks, with zeros for what was not sent."""
        count = payload.numel() // self.wire_bytes(1)
        sizes = [4 * count, 2 * count * self.keep, count * self.keep]
        scales, places, codes = payload.split(sizes)
        values = codes.view(torch.int8).view(count, self.keep) * scales.view(torch.float32)[:, None]
        chunks = torch.zeros(count, self.chunk, dtype=dtype, device=payload.device)
        where = places.view(torch.int16).view(count, self.keep).to(torch.int64) & 0xFFFF
        return chunks.scatter_(1, where, values.to(dtype))


@dataclass(eq=False, repr=False)
class TopKCompressor(Compressor):
    """One all-gather of what each rank sends.

    Args, besides those of `Compressor`:
        decay: of what was not sent, from exchange to exchange.
        start_step: updates before which values travel as they are.
    """

    codec: TopKCodec
    _: KW_ONLY
    decay: float = 1.0
    start_step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chunks = -(-self.num_values // self.codec.chunk)
        self.num_values = self._chunks * self.codec.chunk
        self._residual = Residual(self.zeros(self.num_values))
        self.residuals = [self._residual]

    def exchange(self, values: Tensor, flags: Tensor, step: int) -> ExchangeSteps:
        if step < self.start_step:
            yield from exchange_dense(values, flags)
            return
        values.add_(self._residual.error, alpha=self.decay)
        flags[-1:] |= any_infinite(values)
        payload = self.codec.encode(values.view(self._chunks, self.codec.chunk))
        own = self.codec.decode(payload, self.works_in)
        self._residual.keep(values, own.view(-1))
        length = len(payload)
        padding = -(length + len(flags)) % 8  # so that the scales of every row are aligned
        send = torch.cat([payload, flags, flags.new_zeros(padding)])
        receive = send.new_empty(self.ranks.count, len(send))
        yield AllGather(send, receive)
        flags.copy_(receive[:, length : length + len(flags)].amax(0))
        values.zero_()
        for message in receive:
            values += self.codec.decode(message[:length], self.works_in).view(-1)
        flags[-1:] |= any_infinite(values)

    def forget(self, slots: Sequence[int]) -> None:
        for i in slots:
            self._residual.forget(self.slots[i])

    def state(self) -> list[dict[str, Tensor]]:
        """``error``: what was not sent yet."""
        return [{"error": self._residual.error[slot].clone()} for slot in self.slots]

    def load(self, states: Sequence[SlotState]) -> None:
        self._residual.error.zero_()
        for slot, state in zip(self.slots, states, strict=True):
            if "error" in state:
                self._residual.error[slot] = state["error"]
