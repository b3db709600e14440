"""How a tensor is cut between ranks, and put together again: values only, nothing moves here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor cut along ``axis``: each of ``parts`` equal blocks is cut into pieces of ``sizes``,
    and a rank holds its piece of every block, one behind the other.

    Example:
        >>> shard = Shard(axis=0, sizes=(2, 2), parts=2)
        >>> shard.cut(torch.arange(8), rank=1)
        tensor([2, 3, 6, 7])
        >>> shard.join([shard.cut(torch.arange(8), rank) for rank in (0, 1)])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """

    axis: int
    sizes: tuple[int, ...]
    parts: int = 1

    @classmethod
    def even(cls, axis: int, length: int, ranks: int, parts: int = 1) -> Shard:
        """Pieces of ``length / parts`` values that differ by one at most."""
        each, rest = divmod(length // parts, ranks)
        return cls(axis, tuple(each + (rank < rest) for rank in range(ranks)), parts)

    @property
    def length(self) -> int:
        """Of the whole along the axis."""
        return self.parts * sum(self.sizes)

    def start(self, rank: int) -> int:
        """Where a rank's piece of a block begins in the block."""
        return sum(self.sizes[:rank])

    def cut(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's pieces, copied."""
        blocks = torch.unflatten(whole, self.axis, (self.parts, sum(self.sizes)))
        piece = blocks.narrow(self.axis + 1, self.start(rank), self.sizes[rank])
        own: torch.Tensor = piece.flatten(self.axis, self.axis + 1)
        return own.clone(memory_format=torch.contiguous_format)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from the pieces of all ranks in order; the inverse of `cut`."""
        sized = zip(pieces, self.sizes, strict=True)
        blocks = [torch.unflatten(piece, self.axis, (self.parts, size)) for piece, size in sized]
        return torch.cat(blocks, self.axis + 1).flatten(self.axis, self.axis + 1)
