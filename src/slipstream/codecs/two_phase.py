"""The sum of values that cannot be added up while they are coded, in two exchanges.

Each rank is responsible for one piece of the bucket. Everybody sends everybody its piece, coded;
each adds up what it got, in fp32, and sends the coded sum to all. So every value is coded twice,
however many ranks there are, and each sends ``2 (p - 1) / p`` of the payload: as little as the ring
that adds up plain values. All-gathering coded buckets would take ``p - 1`` of it; a ring of coded
values would round p times.

The scheme of ZeRO++ (Wang et al. 2023), Bagua's ByteGrad and DeepSpeed's 1-bit Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
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
)
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllGather, AllToAll, Exchange

_ALIGNED = 8


class BlockCodec(Protocol):
    """Codes blocks of values, each by itself."""

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

    A worker's residual is what it failed to send of its gradients; a server's, what it failed to
    send of the sum of the piece it is responsible for.

    Args:
        codec: codes pieces.
        sizes: elements of each slot.
        dtype: of the gradients.
        ranks: who takes part.
        device: where the gradients are.
        feedback: whether errors are fed back.
        start_step: updates before which gradients travel as they are.
        num_flags: flags that travel along.
        seed: of the random streams; the same on all ranks.
    """

    def __init__(
        self,
        codec: BlockCodec,
        sizes: Sequence[int],
        dtype: torch.dtype,
        ranks: Ranks,
        device: torch.device,
        *,
        feedback: bool,
        start_step: int = 0,
        num_flags: int = 0,
        seed: int = 0,
    ) -> None:
        self._codec, self._sizes, self._ranks, self._seed = codec, list(sizes), ranks, seed
        self.works_in = real_dtype(dtype)
        self._start_step, self._end = start_step, sum(sizes)
        blocks = -(-self._end // codec.block)
        self._piece = -(-blocks // ranks.count) * codec.block
        self.num_values = self._piece * ranks.count
        coded = codec.wire_bytes(self._piece, self.works_in)
        length = -(-(coded + num_flags) // _ALIGNED) * _ALIGNED  # so that scales are aligned
        self._coded, self._num_flags = coded, num_flags
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
        self._send[:, self._coded : self._coded + self._num_flags] = flags
        yield AllToAll(self._send, self._receive)
        passengers = self._receive[:, self._coded : self._coded + self._num_flags]
        flags.copy_(passengers.amax(0))
        rank = self._ranks.rank
        mine, sent = pieces[rank], self._send[rank]
        self._add_up(mine)
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
        every, mine = self._slots(), self._ranks.rank * self._piece
        for start, stop in (every[slot] for slot in slots):
            self._worker.forget(slice(start, stop))
            first, last = max(start, mine) - mine, min(stop, mine + self._piece) - mine
            if first < last:
                self._server.forget(slice(first, last))

    def state(self) -> list[dict[str, torch.Tensor]]:
        """``error``: of the worker. ``served`` and ``served_from``: of the server, if it is this
        rank's to serve, and the element of the slot where that begins."""
        if self._worker is None or self._server is None:
            return [{} for _ in self._sizes]
        states = []
        mine = self._ranks.rank * self._piece
        for start, stop in self._slots():
            state = {"error": self._worker.error[start:stop].clone()}
            first, last = max(start, mine), min(stop, mine + self._piece)
            if first < last:
                state["served"] = self._server.error[first - mine : last - mine].clone()
                state["served_from"] = torch.tensor(first - start)
            states.append(state)
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        """What a rank served and serves no longer becomes its own error: as gradients come in
        divided by the number of ranks, nothing of what is left out is lost or counted twice."""
        if self._worker is None or self._server is None:
            return
        self._worker.error.zero_()
        served = torch.zeros_like(self._worker.error)
        for (start, stop), state in zip(self._slots(), states, strict=True):
            if "error" in state:
                self._worker.error[start:stop] = state["error"]
            if "served" in state:
                first = start + int(state["served_from"])
                served[first : first + len(state["served"])] = state["served"]
        mine = self._ranks.rank * self._piece
        self._server.error.copy_(served[mine : mine + self._piece])
        served[mine : mine + self._piece] = 0
        self._worker.error.add_(served)

    def _residuals(self) -> list[Residual]:
        return [residual for residual in (self._worker, self._server) if residual is not None]

    def _slots(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self._sizes, initial=0)))

    def _parts(self, payload: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The pieces of a piece that fit into the cache, and where each lies in the payload."""
        at = 0
        for part in parts(self._piece, payload.device, self._codec.block):
            size = self._codec.wire_bytes(part.stop - part.start, self.works_in)
            yield part, payload[at : at + size]
            at += size

    def _encode(
        self,
        piece: torch.Tensor,
        payload: torch.Tensor,
        begin: int,
        residual: Residual | None,
        kept_from: int,
        unsound: torch.Tensor,
    ) -> None:
        """Code a piece that begins at a value of the bucket, what was left out before on top.

        Raises the flag where a value is not finite: the payload is void.
        """
        for part, coded in self._parts(payload):
            values = piece[part]
            kept = slice(kept_from + part.start, kept_from + part.stop)
            if residual is not None:
                residual.add_to(values, kept)
            self._fill_up(values, self._end - begin - part.start)
            self._codec.encode(values, coded, self._random)
            unsound |= any_infinite(self._codec.peaks(coded, self.works_in))
            if residual is not None:
                residual.keep(values, self._codec.decode(coded, self.works_in), kept)

    def _fill_up(self, values: torch.Tensor, end: int) -> None:
        """Make the last block as large as the values in it on average, not smaller for padding."""
        block = self._codec.block
        if 0 < end < len(values) and end % block:
            first = end // block * block
            values[end : first + block] = values[first:end].abs().mean()

    def _add_up(self, total: torch.Tensor) -> None:
        """The sum of what everybody sent of this rank's piece."""
        payloads = [self._parts(payload) for payload in self._receive]
        for together in zip(*payloads, strict=True):
            part, coded = together[0]
            out = self._codec.decode(coded, self.works_in, out=total[part])
            for _, coded in together[1:]:
                out += self._codec.decode(coded, self.works_in)
