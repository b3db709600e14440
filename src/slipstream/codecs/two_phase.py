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
from math import prod
from typing import Protocol

import torch

from slipstream.codecs.compressor import (
    Compressor,
    Ranks,
    SlotState,
    any_infinite,
    exchange_dense,
    mixed,
    parts,
    real_dtype,
    slot_slices,
)
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllGather, AllToAll, Exchange

_ALIGNED = 8


class BlockCodec(Protocol):
    """Encodes blocks of values, each by itself."""

    @property
    def block(self) -> int: ...
    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int: ...
    def encode(
        self,
        values: torch.Tensor,
        out: torch.Tensor | None = None,
        random: torch.Generator | None = None,
    ) -> torch.Tensor: ...
    def decode(
        self, payload: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    def peaks(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class TwoPhaseCompressor(Compressor):
    """The exchange of a bucket by a block codec, with error feedback on both sides if asked for.

    A rank is worker and server: the worker's residual is what encoding left out of its gradients,
    the server's what encoding left out of the sum of the piece that it owns.

    Args:
        codec: encodes pieces.
        shapes: of the gradients, slot by slot.
        dtype: of the gradients.
        ranks: that take part.
        device: of the gradients.
        feedback: whether errors are fed back.
        start_step: updates before which gradients travel as they are.
        num_flags: flags that travel along.
        seed: of the random streams; the same on all ranks.
    """

    def __init__(
        self,
        codec: BlockCodec,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        ranks: Ranks,
        device: torch.device,
        *,
        feedback: bool,
        start_step: int = 0,
        num_flags: int = 0,
        seed: int = 0,
    ) -> None:
        self._codec, self._ranks, self._seed = codec, ranks, seed
        self._slots = slot_slices(map(prod, shapes))
        self.works_in = real_dtype(dtype)
        self._start_step, self._end = start_step, sum(map(prod, shapes))
        blocks = -(-self._end // codec.block)
        self._piece = -(-blocks // ranks.count) * codec.block
        self.num_values = self._piece * ranks.count
        payload = codec.wire_bytes(self._piece, self.works_in)
        self._flags = slice(payload, payload + num_flags)  # of each row, behind the payload
        length = -(-self._flags.stop // _ALIGNED) * _ALIGNED  # so that scales are aligned
        buffers = torch.zeros(2, ranks.count, length, dtype=torch.uint8, device=device)
        self._send, self._receive = buffers
        self._random = torch.Generator(device)
        self._worker = self._server = None
        if feedback:
            self._worker = Residual(
                torch.zeros(self.num_values, dtype=self.works_in, device=device)
            )
            self._server = Residual(torch.zeros(self._piece, dtype=self.works_in, device=device))

    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> Exchange:
        if step < self._start_step:
            yield from exchange_dense(values, flags)
            return
        self._random.manual_seed(mixed(self._seed, step, self._ranks.rank))
        pieces = values.view(self._ranks.count, self._piece)
        for number, piece in enumerate(pieces):
            begin = number * self._piece
            self._encode(piece, self._send[number], begin, self._worker, begin, flags[-1:])
        self._send[:, self._flags] = flags
        yield AllToAll(self._send, self._receive)
        flags.copy_(self._receive[:, self._flags].amax(0))
        rank = self._ranks.rank
        mine, sent = pieces[rank], self._send[rank]
        self._sum_received(mine)
        self._encode(mine, sent, rank * self._piece, self._server, 0, flags[-1:])
        yield AllGather(sent, self._receive)
        for payload, piece in zip(self._receive, pieces, strict=True):
            for part, coded in self._parts(payload):
                self._codec.decode(coded, self.works_in, out=piece[part])
                flags[-1:] |= any_infinite(self._codec.peaks(coded, self.works_in))

    def commit(self) -> None:
        for residual in self._residuals():
            residual.commit()

    def rollback(self) -> None:
        for residual in self._residuals():
            residual.rollback()

    def forget(self, slots: Sequence[int]) -> None:
        if self._worker is None or self._server is None:
            return
        for slot in (self._slots[i] for i in slots):
            self._worker.forget(slot)
            if served := self._served(slot):
                self._server.forget(served)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """``error``: of the worker. ``served`` and ``served_from``: of the server, for the part of
        the slot that this rank owns, and the element of the slot where that part begins."""
        if self._worker is None or self._server is None:
            return [{} for _ in self._slots]
        states = []
        for slot in self._slots:
            state = {"error": self._worker.error[slot].clone()}
            if served := self._served(slot):
                state["served"] = self._server.error[served].clone()
                first = served.start + self._ranks.rank * self._piece
                state["served_from"] = torch.tensor(first - slot.start)
            states.append(state)
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
        for slot, state in zip(self._slots, states, strict=True):
            if "error" in state:
                self._worker.error[slot] = state["error"]
            if "served" in state:
                first = slot.start + int(state["served_from"])
                served[first : first + len(state["served"])] = state["served"]
        mine = self._ranks.rank * self._piece
        self._server.error.copy_(served[mine : mine + self._piece])
        served[mine : mine + self._piece] = 0
        self._worker.error.add_(served)

    def _residuals(self) -> list[Residual]:
        return [residual for residual in (self._worker, self._server) if residual is not None]

    def _served(self, slot: slice) -> slice | None:
        """The part of a slot that this rank owns, counted from the start of its piece."""
        start = self._ranks.rank * self._piece
        first, last = max(slot.start, start), min(slot.stop, start + self._piece)
        return slice(first - start, last - start) if first < last else None

    def _parts(self, payload: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of a piece that fit into the cache, and the bytes of each in the payload."""
        start = 0
        for part in parts(self._piece, payload.device, self._codec.block):
            stop = start + self._codec.wire_bytes(part.stop - part.start, self.works_in)
            yield part, payload[start:stop]
            start = stop

    def _encode(
        self,
        piece: torch.Tensor,
        payload: torch.Tensor,
        begin: int,
        residual: Residual | None,
        residual_begin: int,
        nonfinite: torch.Tensor,
    ) -> None:
        """Encode a piece plus its residual; raise the flag where a value is not finite.

        ``begin`` and ``residual_begin`` are where the piece begins in the bucket and the residual.
        """
        for part, coded in self._parts(payload):
            values = piece[part]
            where = slice(residual_begin + part.start, residual_begin + part.stop)
            if residual is not None:
                residual.add_to(values, where)
            self._fill_last_block(values, self._end - begin - part.start)
            self._codec.encode(values, coded, self._random)
            nonfinite |= any_infinite(self._codec.peaks(coded, self.works_in))
            if residual is not None:
                residual.keep(values, self._codec.decode(coded, self.works_in), where)

    def _fill_last_block(self, values: torch.Tensor, end: int) -> None:
        """Pad the last block with its mean magnitude: zeros would lower a block's mean."""
        block = self._codec.block
        if 0 < end < len(values) and end % block:
            first = end // block * block
            values[end : first + block] = values[first:end].abs().mean()

    def _sum_received(self, total: torch.Tensor) -> None:
        """Leave the sum of what all ranks sent of this rank's piece in ``total``."""
        payloads = [self._parts(payload) for payload in self._receive]
        for (part, first), *others in zip(*payloads, strict=True):
            out = self._codec.decode(first, self.works_in, out=total[part])
            for _, coded in others:
                out += self._codec.decode(coded, self.works_in)
