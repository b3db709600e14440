"""Allocate slots in large slabs, and reuse them.

Pure bookkeeping of offsets: the store provides the slabs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

ALIGNMENT = 4096
"""Slots begin at multiples of the page size of memory and disks."""


class Slot(NamedTuple):
    """A range of bytes in a slab."""

    num_bytes: int
    slab: int
    offset: int


class Slots:
    """Slots of any size; a free one is reused for the next request that fits it best.

    When no slot is in use, as after each backward, allocation restarts from the beginning of the
    slabs, so sizes that change from batch to batch do not fragment them.

    Args:
        add_slab: makes so many more bytes available; if it raises, no slot is allocated.
        slab_bytes: size of a slab, unless one slot needs more; a power of two, to which torch
            rounds pinned memory up anyway.
        budget_bytes: limit of all slabs; None: none.

    Raises:
        MemoryError: from `take`: the budget is exhausted.

    Example:
        >>> sizes = []
        >>> slots = Slots(sizes.append, slab_bytes=2**16)
        >>> first, second = slots.take(5000), slots.take(100)
        >>> first, second, sizes
        (Slot(num_bytes=8192, slab=0, offset=0), Slot(num_bytes=4096, slab=0, offset=8192), [65536])
        >>> slots.give_back(first)
        >>> slots.take(6000) == first
        True
    """

    def __init__(
        self, add_slab: Callable[[int], None], slab_bytes: int, budget_bytes: int | None = None
    ) -> None:
        self._add_slab, self._slab_bytes = add_slab, slab_bytes
        self._budget = budget_bytes
        self._slabs: list[int] = []  # sizes
        self._used: list[int] = []  # bytes of each slab that slots cover, free ones included
        self._free: list[Slot] = []  # sorted, the smallest first
        self._num_taken = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(self._slabs)

    def take(self, num_bytes: int) -> Slot:
        """Allocate a slot of at least so many bytes."""
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if not self._num_taken:
            self._free, self._used = [], [0] * len(self._slabs)
        slot = self._reuse(size) or self._append(size)
        self._num_taken += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """The slot may be reused."""
        insort(self._free, slot)
        self._num_taken -= 1

    def _reuse(self, size: int) -> Slot | None:
        """The smallest free slot that is large enough, unless half of it or more would be idle."""
        index = bisect_left(self._free, (size,))
        if index < len(self._free) and self._free[index].num_bytes < 2 * size:
            return self._free.pop(index)
        return None

    def _append(self, size: int) -> Slot:
        """A slot behind the others of a slab, of a new slab if none has space."""
        fits = (i for i, used in enumerate(self._used) if self._slabs[i] - used >= size)
        slab = next(fits, len(self._slabs))
        if slab == len(self._slabs):
            slab_bytes = max(self._slab_bytes, 1 << (size - 1).bit_length())
            needed = self.reserved_bytes + slab_bytes
            if self._budget is not None and needed > self._budget:
                raise MemoryError(
                    f"{needed / 2**30:.2f} GiB would be needed, but the budget (a rank's share of "
                    f"the free space) is {self._budget / 2**30:.2f} GiB"
                )
            self._add_slab(slab_bytes)
            self._slabs.append(slab_bytes)
            self._used.append(0)
        offset = self._used[slab]
        self._used[slab] += size
        return Slot(size, slab, offset)
