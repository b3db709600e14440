"""Receive buffers posted ahead of sends, for transports that share them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

AHEAD = 64 * 2**20
"""Bytes of pieces that are received ahead at most, beyond those of the tensor that is next."""
ALIGNMENT = 64
"""Bytes; shares begin at multiples of it, as vectorized sums like."""
TAGS = 2**15
"""Exchanges after which tags begin anew; far more than are ever under way."""


def aligned_length(count: int, parts: int, unit: int) -> int:
    """Elements of each of so many equal parts, a multiple of ``unit``; the last may have fewer.

    Example:
        >>> aligned_length(40, parts=4, unit=16)
        16
    """
    return -(-count // (parts * unit)) * unit


def cut_into_shares(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A tensor of one axis as shares by rank; the first is the longest, the last may be empty.

    Example:
        >>> [share.numel() for share in cut_into_shares(torch.zeros(40), 4)]
        [16, 16, 8, 0]
    """
    unit = max(ALIGNMENT // flat.itemsize, 1)
    length = aligned_length(flat.numel(), ranks, unit)
    return [flat[rank * length :][:length] for rank in range(ranks)]


class Pieces(NamedTuple):
    """Shape of the buffer for peers' pieces that await summation: rows of so many elements."""

    rows: int
    elements: int
    dtype: torch.dtype
    post: Callable[[torch.Tensor], None]
    """Gets memory of that shape, and posts the receives into it."""


class ReceiveBuffers:
    """Memory for the pieces of exchanges, given out in their order as far as `AHEAD` goes.

    One exchange always gets its memory, however large. Any thread may call.

    Example:
        >>> posted = []
        >>> buffers = ReceiveBuffers()
        >>> buffers.announce([Pieces(3, 2**23, torch.float32, posted.append) for _ in range(2)])
        >>> len(posted)  # 96 MB each
        1
        >>> buffers.give_back(posted[0])
        >>> len(posted)
        2
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[Pieces] = deque()
        self._ahead = 0
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def announce(self, exchanges: Sequence[Pieces]) -> None:
        """Post the receives of exchanges to come, now or once those before them gave back."""
        with self._lock:
            if len(exchanges) > 1:  # of a backward pass: memory of another layout is not needed
                layouts = {_layout(pieces) for pieces in exchanges}
                self._free = {key: rows for key, rows in self._free.items() if key in layouts}
            self._waiting.extend(exchanges)
            self._post()

    def give_back(self, rows: torch.Tensor) -> None:
        """Memory whose pieces are added: post the receives of the next exchanges."""
        with self._lock:
            self._ahead -= rows.nbytes
            self._free.setdefault((rows.shape, rows.dtype), []).append(rows)
            self._post()

    def _post(self) -> None:
        while self._waiting:
            pieces = self._waiting[0]
            num_bytes = pieces.rows * pieces.elements * pieces.dtype.itemsize
            if self._ahead and self._ahead + num_bytes > AHEAD:
                return
            self._waiting.popleft()
            self._ahead += num_bytes
            free = self._free.get(_layout(pieces))
            shape = pieces.rows, pieces.elements
            pieces.post(free.pop() if free else torch.empty(shape, dtype=pieces.dtype))


def _layout(pieces: Pieces) -> tuple[torch.Size, torch.dtype]:
    return torch.Size((pieces.rows, pieces.elements)), pieces.dtype
