"""The reduce-scatter of values that cannot be summed while they are encoded, in one phase.

Every rank sends each other rank that one's row, encoded; the owner decodes and sums in rank order.
So a value is rounded once, an own value never, and each rank sends ``(p - 1) / p`` of the payload.

    sent_t = C(x_t + e_t),    e_(t+1) = x_t + e_t - sent_t

The first half of `TwoPhaseCompressor`, as ZeRO++ (Wang et al. 2023) sends gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.codecs.blocks import BlockCodec
from slipstream.codecs.compressor import Ranks, any_infinite, mixed, parts, real_dtype
from slipstream.transport.requests import AllToAll, ExchangeSteps

_ALIGNED = 8


class ScatterCompressor:
    """One rank's side of the coded reduce-scatter of one tensor.

    Args:
        codec: encodes blocks of values.
        ranks: that take part.
        feedback: whether what encoding leaves out is added to the next values; costs twice as much
            memory as the rows of the other ranks, in fp32.
        seed: of random streams; another one for each tensor.

    Attributes:
        calls: exchanges so far.
        error: what the other ranks were not sent yet, a row for each of them, in their order; None:
            nothing was exchanged, or nothing is fed back.
        settled: the ``error`` of the last `settle`.

    Example:
        >>> from slipstream.codecs import Int8Codec
        >>> compressor = ScatterCompressor(Int8Codec(block=8), Ranks(0, 2), feedback=False)
        >>> steps = compressor.exchange(torch.ones(2, 3), out := torch.empty(3))
        >>> request = next(steps)
        >>> request.send.shape, request.send.dtype  # scale and codes, a flag, padding
        (torch.Size([2, 16]), torch.uint8)
        >>> request.receive[1] = request.send[1]  # as if the other rank had sent the same
        >>> list(steps), out
        ([], tensor([2., 2., 2.]))
    """

    def __init__(self, codec: BlockCodec, ranks: Ranks, *, feedback: bool, seed: int = 0) -> None:
        self.codec, self.ranks, self.feedback = codec, ranks, feedback
        self.calls = 0
        self.error: Tensor | None = None
        self.settled: Tensor | None = None
        self._seed, self._random = seed, torch.Generator()
        self._others = [rank for rank in range(ranks.count) if rank != ranks.rank]

    def exchange(self, rows: Tensor, out: Tensor) -> ExchangeSteps:
        """Leave the sum over ranks of this rank's row in ``out``.

        Where a value of any rank is infinite or NaN, all of ``out`` becomes NaN on all ranks, and
        what is owed stays as it was (within its rounding).

        Args:
            rows: a row of real values for each rank; the same shape on all ranks.
            out: of the length of a row.
        """
        width, dtype = rows.shape[1], real_dtype(rows.dtype)
        if self.feedback and self.error is None:
            self.error = rows.new_zeros(len(self._others), width, dtype=dtype)
        self._random.manual_seed(mixed(self._seed, self.calls, self.ranks.rank))
        self.calls += 1
        finite = not any_infinite(rows)
        payload = self._wire_bytes(width, dtype)
        length = -(-(payload + 1) // _ALIGNED) * _ALIGNED  # so that scales are aligned
        send, receive = torch.zeros(2, self.ranks.count, length, dtype=torch.uint8)
        for place, other in enumerate(self._others):
            values = rows[other]
            if self.error is not None and finite:
                values = self.error[place].add_(values)
            self._encode(values, send[other], dtype)
        send[:, payload] = not finite
        yield AllToAll(send, receive)
        if receive[:, payload].any():
            out.fill_(torch.nan)
            if self.error is not None and finite:
                self.error.sub_(rows[self._others])
            return
        for place, other in enumerate(self._others if self.error is not None else ()):
            assert self.error is not None
            for part, coded in self._parts(width, dtype, send[other]):
                self.error[place, part] -= self._decode(coded, part, dtype)
        self._sum(rows[self.ranks.rank], receive, out, dtype)

    def settle(self) -> None:
        """All exchanges so far count; those that follow can be taken back."""
        if self.error is None:
            self.settled = None
        elif self.settled is None:
            self.settled = self.error.clone()
        else:
            self.settled.copy_(self.error)

    def take_back(self) -> None:
        """Owe what was owed at the last `settle`: no exchange since counts."""
        if self.settled is None:
            self.error = None
        elif self.error is not None:
            self.error.copy_(self.settled)

    def _sum(self, own: Tensor, receive: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        """Add up in rank order what came and this rank's own row."""
        payloads = [list(self._parts(len(own), dtype, row)) for row in receive]
        for number, (part, _) in enumerate(payloads[0]):
            total = torch.zeros(part.stop - part.start, dtype=dtype)
            for rank in range(self.ranks.count):
                if rank == self.ranks.rank:
                    total += own[part]
                else:
                    total += self._decode(payloads[rank][number][1], part, dtype)
            out[part] = total

    def _encode(self, values: Tensor, payload: Tensor, dtype: torch.dtype) -> None:
        for part, coded in self._parts(len(values), dtype, payload):
            count = part.stop - part.start
            padded = torch.zeros(self._padded(count), dtype=dtype)
            padded[:count] = values[part]
            if rest := count % self.codec.block:  # zeros would lower a block's mean
                padded[count:] = padded[count - rest : count].abs().mean()
            self.codec.encode(padded, coded, self._random)

    def _decode(self, coded: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        return self.codec.decode(coded, dtype)[: part.stop - part.start]

    def _parts(
        self, width: int, dtype: torch.dtype, payload: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Slices of a row that fit into the cache, and the bytes of each in the payload."""
        start = 0
        for part in parts(width, payload.device, self.codec.block):
            stop = start + self._wire_bytes(part.stop - part.start, dtype)
            yield part, payload[start:stop]
            start = stop

    def _padded(self, count: int) -> int:
        return -(-count // self.codec.block) * self.codec.block

    def _wire_bytes(self, count: int, dtype: torch.dtype) -> int:
        return self.codec.wire_bytes(self._padded(count), dtype)
