"""Sequences laid one behind the other in rows, each seeing itself alone: no token is padding.

[Note: What keeps sequences apart]
Attention gets a mask of blocks along the diagonal, positions begin at 0 in each sequence, and no
sequence's first token is a label for the last one of another. So the output for a sequence, its
loss and its gradient are those of the sequence alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.errors import UsageError

PADDING = -1
"""The sequence of tokens that belong to none."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences in rows; all tensors have the shape ``(rows, length)``.

    Attributes:
        tokens: of the sequences, and padding at the ends of rows.
        positions: from 0 in each sequence.
        sequences: the number of each token's sequence; PADDING: of none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: torch.Tensor

    def mask(self, *, causal: bool = False) -> torch.Tensor:
        """Whether each token sees each other one: bool, ``(rows, 1, length, length)``, as
        ``scaled_dot_product_attention`` takes it.

        Args:
            causal: tokens see none that come later.

        Example:
            >>> packed = pack([torch.tensor([7, 8]), torch.tensor([9])])
            >>> packed.mask(causal=True)[0, 0].int().tolist()
            [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        same = self.sequences[:, None, :, None] == self.sequences[:, None, None, :]
        return same.tril() if causal else same

    def additive_mask(self, dtype: torch.dtype, *, causal: bool = False) -> torch.Tensor:
        """`mask` as what is added to scores: 0, or the least number of ``dtype``."""
        hidden = ~self.mask(causal=causal)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, torch.finfo(dtype).min
        )

    def labels(self, ignored: int = -100) -> torch.Tensor:
        """The tokens as labels of a model that shifts them by one, as those of ``transformers`` do.

        The first token of each sequence, which the one before would have to predict, and padding
        are ``ignored``.
        """
        return self.tokens.masked_fill((self.positions == 0) | (self.sequences == PADDING), ignored)

    def ends(self) -> torch.Tensor:
        """Find where sequences end in the flattened rows, 0 first: int32, as attention of sequences
        of different lengths takes it (``cu_seqlens``). Padding at the end of a row counts as one.

        Example:
            >>> pack([torch.tensor([7, 8]), torch.tensor([9])]).ends().tolist()
            [0, 2, 3]
        """
        flat, rows = self.sequences.flatten(), torch.arange(len(self.sequences))
        row = rows.to(flat.device).repeat_interleave(self.sequences.shape[1])
        begins = (flat[1:] != flat[:-1]) | (row[1:] != row[:-1])
        inner = begins.nonzero().flatten() + 1
        edges = [inner.new_zeros(1), inner, inner.new_full((1,), flat.numel())]
        return torch.cat(edges).to(torch.int32)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of each sequence, in the order in which `pack` got them.

        Args:
            values: ``(rows, length, ...)``, of every token.
        """
        flat, owner = values.flatten(0, 1), self.sequences.flatten()
        return [flat[owner == number] for number in range(self.num_sequences)]

    def means(self, values: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of the values of each sequence, ``(sequences,)``: per-sequence losses.

        Args:
            values: ``(rows, length)``, of every token.
            counted: bool, of the same shape: which of them count; None: all.

        Example:
            >>> packed = pack([torch.tensor([7, 8]), torch.tensor([9])])
            >>> packed.means(torch.tensor([[1.0, 3.0, 5.0]])).tolist()
            [2.0, 5.0]
        """
        used = self.sequences != PADDING
        used = used if counted is None else used & counted
        owner = self.sequences[used]
        is_half = values.dtype in (torch.bfloat16, torch.float16)
        added = values.float() if is_half else values  # a sum in 16 bits stops to grow
        sums = added.new_zeros(self.num_sequences).index_add(0, owner, added[used])
        counts = torch.bincount(owner, minlength=self.num_sequences)
        means = sums / counts.clamp(min=1)
        return means.to(values.dtype) if is_half else means

    @property
    def num_sequences(self) -> int:
        """Number of packed sequences."""
        return int(self.sequences.max()) + 1


def pack(
    sequences: Sequence[torch.Tensor], length: int | None = None, *, padding: int = 0
) -> Packed:
    """Lay sequences behind one another in rows.

    Each goes, the longest first, into the row that has least room left for it.

    Args:
        sequences: of token numbers, one axis each, not empty.
        length: of a row, at least that of the longest sequence; None: one row for all of them.
        padding: the token at the ends of rows.

    Raises:
        UsageError: no sequence, an empty one, or one that is longer than a row.

    Exactness: reordered, against each sequence alone.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021).

    Example:
        >>> packed = pack([torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])], 4)
        >>> packed.tokens.tolist(), packed.positions.tolist()
        ([[1, 2, 3, 4], [5, 6, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 1]])
    """
    lengths = [len(one) for one in sequences]
    _check(sequences, lengths, length)
    length = sum(lengths) if length is None else length
    rows = fill_rows(lengths, length)
    shape = len(rows), length
    like = sequences[0]
    tokens = like.new_full(shape, padding)
    positions = torch.zeros(shape, dtype=torch.int64, device=like.device)
    owners = torch.full(shape, PADDING, dtype=torch.int64, device=like.device)
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            stop = start + lengths[number]
            tokens[row, start:stop] = sequences[number]
            positions[row, start:stop] = torch.arange(lengths[number])
            owners[row, start:stop] = number
            start = stop
        positions[row, start:] = torch.arange(length - start)
    return Packed(tokens, positions, owners)


def fill_rows(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Which sequences share each row of a length: best fit, the longest first.

    Example:
        >>> fill_rows([3, 1, 2, 2], 4)
        [[0, 1], [2, 3]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, ascending
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect_left(room, (lengths[number], -1))
        if place == len(room):
            rows.append([])
            left, row = length, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        insort(room, (left - lengths[number], row))
    return rows


def _check(sequences: Sequence[torch.Tensor], lengths: list[int], length: int | None) -> None:
    if not lengths:
        raise UsageError("pack() got no sequence; allowed: one or more")
    shortest, longest = min(lengths), max(lengths)
    if any(one.ndim != 1 for one in sequences) or not shortest:
        wrong = next(n for n, one in enumerate(sequences) if one.ndim != 1 or not len(one))
        raise UsageError(
            f"sequence {wrong} has shape {tuple(sequences[wrong].shape)}; allowed: one axis, with "
            "one token or more"
        )
    if length is not None and longest > length:
        raise UsageError(
            f"sequence {lengths.index(longest)} has {longest} tokens, a row {length}; cut or leave "
            "out longer sequences, or give longer rows"
        )
