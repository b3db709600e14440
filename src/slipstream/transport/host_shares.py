"""The work of each rank of a host on the chunks of a tensor: puts, adds and takes shares.

[Note: One chunk]
Every tensor is cut into shares, one a rank, and these into chunks that fit into a core's cache. Of
each chunk a rank (1) copies the others' shares into its row of the shared memory, (2) adds the rows
of its own share in rank order, (3) copies the others' sums back. A few chunks are under way, each
in a slot of its own, so no rank waits for a slower one at each of them, and the memory is small
however large the tensors: it stays in the caches.

Two ranks have it simpler: each copies whole chunks into its row, and adds the other's row to its
tensor. As many bytes move, and nobody waits a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from slipstream.transport.ahead import ALIGNMENT, aligned_length
from slipstream.transport.direct import add_in_order


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor cut into shares, one an owner, and these into chunks.

    Example:
        >>> Cut.even(torch.arange(40), 2, 256).piece(1, 0)
        tensor([24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39])
    """

    flat: torch.Tensor
    shares: Sequence[torch.Tensor]
    width: int  # elements of a piece: a chunk's part of a share
    num_chunks: int

    @classmethod
    def even(cls, tensor: torch.Tensor, owners: int, chunk: int) -> Cut:
        """Into equal shares for so many owners; ``chunk``: bytes of a chunk."""
        flat = tensor.view(-1)
        unit = max(ALIGNMENT // flat.itemsize, 1)
        length = aligned_length(flat.numel(), owners, unit)
        return cls.at([owner * length for owner in range(owners + 1)], tensor, chunk)

    @classmethod
    def at(cls, borders: Sequence[int], tensor: torch.Tensor, chunk: int) -> Cut:
        """Into shares that begin at these elements; the last border ends the last share."""
        flat, owners = tensor.view(-1), len(borders) - 1
        shares = [flat[slice(*ends)] for ends in pairwise(borders)]
        unit = max(ALIGNMENT // flat.itemsize, 1)
        width = max(chunk // owners // ALIGNMENT * ALIGNMENT // flat.itemsize, unit)
        # An empty tensor is a chunk, too: it must not overtake those before it.
        chunks = max(-(-share.numel() // width) for share in shares)
        return cls(flat, shares, width, max(chunks, 1))

    def piece(self, owner: int, chunk: int) -> torch.Tensor:
        """Slice of an owner in a chunk; may be empty."""
        return self.shares[owner][chunk * self.width :][: self.width]


@dataclass(slots=True)
class HostSum:
    """A sum over a host's ranks, chunk by chunk: the stages of a pipeline.

    Args:
        cut: of the tensor; share i belongs to row i modulo the number of rows.
        blocks: the places of its pieces, by slot, row and share.
        rows: one for each rank of the host.
        row: this rank's.
    """

    cut: Cut
    blocks: list[list[list[torch.Tensor]]]
    rows: int
    row: int

    def put(self, slot: int, chunk: int) -> None:
        """Copy the others' pieces into this rank's row."""
        for owner, block in enumerate(self.blocks[slot][self.row]):
            if owner % self.rows != self.row:
                _copy(self.cut.piece(owner, chunk), block)

    def add(self, slot: int, chunk: int) -> None:
        """Add the rows of this rank's pieces into its tensor."""
        rows = self.blocks[slot]
        for owner in range(self.row, len(rows[0]), self.rows):
            own = self.cut.piece(owner, chunk)
            if length := own.numel():
                pieces = [row[owner][:length] for row in rows]
                pieces[self.row] = own
                add_in_order(pieces, own)

    def give(self, slot: int, chunk: int) -> None:
        """Copy this rank's pieces to where all ranks find them: the first row."""
        for owner in range(self.row, len(self.blocks[slot][0]), self.rows):
            _copy(self.cut.piece(owner, chunk), self.blocks[slot][0][owner])

    def add_and_give(self, slot: int, chunk: int) -> None:
        """``add``, then ``give``: nobody but this rank reads its pieces of the first row before."""
        self.add(slot, chunk)
        self.give(slot, chunk)

    def put_all(self, slot: int, chunk: int) -> None:
        """Copy the whole chunk of a tensor without owners into this rank's row."""
        _copy(self.cut.piece(0, chunk), self.blocks[slot][self.row][0])

    def add_two(self, slot: int, chunk: int) -> None:
        """Add the other rank's row to the tensor, in the order of the rows."""
        own = self.cut.piece(0, chunk)
        if length := own.numel():
            pieces = [row[0][:length] for row in self.blocks[slot]]
            pieces[self.row] = own
            add_in_order(pieces, own)

    def take(self, slot: int, chunk: int) -> None:
        """Copy the others' pieces into the tensor."""
        for owner, block in enumerate(self.blocks[slot][0]):
            if owner % self.rows != self.row:
                piece = self.cut.piece(owner, chunk)
                if length := piece.numel():
                    piece.copy_(block[:length])


def _copy(piece: torch.Tensor, block: torch.Tensor) -> None:
    if length := piece.numel():
        block[:length].copy_(piece)
