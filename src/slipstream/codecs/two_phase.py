"""The sum of values that cannot be summed while they are encoded, in two phases.

Each rank owns one piece of the bucket. Every rank sends each piece, encoded, to its owner; the
owner sums what it got, in fp32, and sends the encoded sum to all. So every value is encoded twice,
however many ranks there are, and each rank sends ``2 (p - 1) / p`` of the payload: as little as a
ring that sums plain values. An all-gather of encoded buckets would send ``p - 1`` of it; a ring of
encoded values would round p times.

The scheme of ZeRO++ (Wang et al. 2023), Bagua's ByteGrad and DeepSpeed's 1-bit Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from slipstream.codecs.blocks import BlockCodec
from slipstream.codecs.compressor import (
    Compressor,
    SlotState,
    any_infinite,
    exchange_dense,
    mixed,
    parts,
)
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllGather, AllToAll, ExchangeSteps

_ALIGNED = 8


@dataclass(eq=False, repr=False)
class TwoPhaseCompressor(Compressor):
    """The exchange of a bucket by a block codec, with error feedback on both sides if asked for.

    A rank is worker and server: the worker's residual is what encoding left out of its gradients,
    the server's what encoding left out of the sum of the piece that it owns.

    Args, besides those of `Compressor`:
        feedback: whether errors are fed back.
        start_step: updates before which gradients travel as they are.
    """

    codec: BlockCodec
    _: KW_ONLY
    feedback: bool
    start_step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end = self.num_values
        blocks = -(-self._end // self.codec.block)
        self._piece = -(-blocks // self.ranks.count) * self.codec.block
        self._start = self.ranks.rank * self._piece  # of the piece that this rank owns
        self.num_values = self._piece * self.ranks.count
        payload = self.codec.wire_bytes(self._piece, self.works_in)
        self._flags = slice(payload, payload + self.num_flags)  # of each row, behind the payload
        length = -(-self._flags.stop // _ALIGNED) * _ALIGNED  # so that scales are aligned
        buffers = torch.zeros(2, self.ranks.count, length, dtype=torch.uint8, device=self.device)
        self._send, self._receive = buffers
        self._random = torch.Generator(self.device)
        self._worker = self._server = None
        if self.feedback:
            self._worker = Residual(self.zeros(self.num_values))
            self._server = Residual(self.zeros(self._piece))
            self.residuals = [self._worker, self._server]

    def exchange(self, values: Tensor, flags: Tensor, step: int) -> ExchangeSteps:
        if step < self.start_step:
            yield from exchange_dense(values, flags)
            return
        self._random.manual_seed(mixed(self.seed, step, self.ranks.rank))
        pieces = values.view(self.ranks.count, self._piece)
        for number, piece in enumerate(pieces):
            begin = number * self._piece
            self._encode(piece, self._send[number], begin, self._worker, flags[-1:])
        self._send[:, self._flags] = flags
        yield AllToAll(self._send, self._receive)
        flags.copy_(self._receive[:, self._flags].amax(0))
        mine, sent = pieces[self.ranks.rank], self._send[self.ranks.rank]
        self._sum_received(mine)
        self._encode(mine, sent, self._start, self._server, flags[-1:])
        yield AllGather(sent, self._receive)
        for payload, piece in zip(self._receive, pieces, strict=True):
            for part, coded in self._parts(payload):
                self.codec.decode(coded, self.works_in, out=piece[part])
                flags[-1:] |= any_infinite(self.codec.peaks(coded, self.works_in))

    def forget(self, slots: Sequence[int]) -> None:
        if self._worker is not None and self._server is not None:
            for slot in (self.slots[i] for i in slots):
                self._worker.forget(slot)
                self._server.forget(self._served(slot))

    def state(self) -> list[dict[str, Tensor]]:
        """``error``: of the worker. ``served`` and ``served_from``: of the server, for the part of
        the slot that this rank owns, and the element of the slot where that part begins."""
        if self._worker is None or self._server is None:
            return [{} for _ in self.slots]
        states = [{"error": self._worker.error[slot].clone()} for slot in self.slots]
        for slot, state in zip(self.slots, states, strict=True):
            served = self._server.error[self._served(slot)].clone()
            if served.numel():
                state["served"] = served
                state["served_from"] = torch.tensor(max(self._start - slot.start, 0))
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        """Go on from ``state()``.

        What this rank served but no longer owns is added to its worker's error. As gradients come
        in divided by the number of ranks, nothing is lost or counted twice.
        """
        if self._worker is None or self._server is None:
            return
        self._worker.error.zero_()
        served = torch.zeros_like(self._worker.error)
        for slot, state in zip(self.slots, states, strict=True):
            if "error" in state:
                self._worker.error[slot] = state["error"]
            if "served" in state:
                first = slot.start + int(state["served_from"])
                served[first : first + len(state["served"])] = state["served"]
        mine = served[self._start : self._start + self._piece]
        self._server.error.copy_(mine)
        mine.zero_()
        self._worker.error.add_(served)

    def _served(self, slot: slice) -> slice:
        """The part of a slot that this rank owns, counted from the start of its piece."""
        first, last = (min(max(x - self._start, 0), self._piece) for x in (slot.start, slot.stop))
        return slice(first, last)

    def _parts(self, payload: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of a piece that fit into the cache, and the bytes of each in the payload."""
        start = 0
        for part in parts(self._piece, payload.device, self.codec.block):
            stop = start + self.codec.wire_bytes(part.stop - part.start, self.works_in)
            yield part, payload[start:stop]
            start = stop

    def _encode(
        self, piece: Tensor, payload: Tensor, begin: int, residual: Residual | None, flag: Tensor
    ) -> None:
        """Encode a piece plus its residual; raise the flag where a value is not finite.

        ``begin`` is where the piece begins in the bucket, and in the worker's residual.
        """
        first = begin if residual is self._worker else 0
        for part, coded in self._parts(payload):
            values = piece[part]
            where = slice(first + part.start, first + part.stop)
            if residual is not None:
                residual.add_to(values, where)
            self._fill_last_block(values, self._end - begin - part.start)
            self.codec.encode(values, coded, self._random)
            flag |= any_infinite(self.codec.peaks(coded, self.works_in))
            if residual is not None:
                residual.keep(values, self.codec.decode(coded, self.works_in), where)

    def _fill_last_block(self, values: Tensor, end: int) -> None:
        """Pad the last block with its mean magnitude: zeros would lower a block's mean."""
        block = self.codec.block
        if 0 < end < len(values) and end % block:
            first = end // block * block
            values[end : first + block] = values[first:end].abs().mean()

    def _sum_received(self, total: Tensor) -> None:
        """Leave the sum of what all ranks sent of this rank's piece in ``total``."""
        payloads = [self._parts(payload) for payload in self._receive]
        for (part, first), *others in zip(*payloads, strict=True):
            out = self.codec.decode(first, self.works_in, out=total[part])
            for _, coded in others:
                out += self.codec.decode(coded, self.works_in)
