"""Shards of a tensor over ranks; pure functions of tensors, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def even_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Sizes of ``ranks`` pieces of ``length`` that differ by at most one, larger ones first.

    Example:
        >>> even_sizes(7, 2)
        (4, 3)
    """
    size, rest = divmod(length, ranks)
    return tuple(size + (rank < rest) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor split along ``axis``: it consists of ``parts`` equal blocks, each block is split
    into pieces of ``sizes``, and a rank holds its piece of every block, concatenated.

    Example:
        >>> shard = Shard(axis=0, sizes=(2, 2), parts=2)
        >>> shard.piece(torch.arange(8), rank=1)
        tensor([2, 3, 6, 7])
        >>> shard.join([shard.piece(torch.arange(8), rank) for rank in (0, 1)])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """

    axis: int
    sizes: tuple[int, ...]
    parts: int = 1

    @classmethod
    def even(cls, axis: int, length: int, ranks: int, parts: int = 1) -> Shard:
        """Pieces of ``length / parts`` values that differ by at most one."""
        return cls(axis, even_sizes(length // parts, ranks), parts)

    @property
    def length(self) -> int:
        """Length of the whole tensor along ``axis``."""
        return self.parts * sum(self.sizes)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the ranks' tensors along ``axis``."""
        return tuple(self.parts * size for size in self.sizes)

    def resized(self, shape: Sequence[int], length: int) -> torch.Size:
        """``shape`` with ``length`` along ``axis``."""
        return torch.Size((*shape[: self.axis], length, *shape[self.axis + 1 :]))

    def start(self, rank: int) -> int:
        """The offset of a rank's piece in its block."""
        return sum(self.sizes[:rank])

    def piece(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of what ``rank`` holds of ``whole``."""
        blocks = torch.unflatten(whole, self.axis, (self.parts, sum(self.sizes)))
        pieces = blocks.narrow(self.axis + 1, self.start(rank), self.sizes[rank])
        local: torch.Tensor = pieces.flatten(self.axis, self.axis + 1)
        return local.clone(memory_format=torch.contiguous_format)

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from the pieces of all ranks in order; the inverse of `piece`."""
        sized = zip(pieces, self.sizes, strict=True)
        blocks = [torch.unflatten(piece, self.axis, (self.parts, size)) for piece, size in sized]
        return torch.cat(blocks, self.axis + 1).flatten(self.axis, self.axis + 1)
