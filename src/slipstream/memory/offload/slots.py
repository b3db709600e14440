"""Where bytes lie in a store: places in large slabs, taken and given back.

Pure: never allocates memory nor touches a file; a store makes the slabs that are asked of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

ALIGNMENT = 4096
"""Places begin at multiples of it: pages of memory and of disks."""


class Slot(NamedTuple):
    """A place: so many bytes, of which slab, from which byte of it on."""

    num_bytes: int
    slab: int
    offset: int


class Slots:
    """Places of any size; one that was given back serves the next that fits it best.

    When none is taken any more, as after each backward, they are dealt out anew from the start: so
    sizes that change from batch to batch leave no holes behind.

    Args:
        add_slab: makes room for so many bytes more; what it raises is passed on, and nothing taken.
        slab_bytes: of a slab, unless one place needs more; a power of two, to which torch rounds
            pinned memory up.

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

    def __init__(self, add_slab: Callable[[int], None], slab_bytes: int = 2**28) -> None:
        self._add_slab, self._slab_bytes = add_slab, slab_bytes
        self._slabs: list[int] = []  # sizes
        self._free: list[Slot] = []  # sorted, the smallest first
        self._rests: list[int] = []  # where the unused end of each slab begins
        self._taken = 0

    @property
    def reserved_bytes(self) -> int:
        """Of all slabs."""
        return sum(self._slabs)

    def take(self, num_bytes: int) -> Slot:
        """A place for so many bytes."""
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if not self._taken:
            self._free, self._rests = [], [0] * len(self._slabs)
        slot = self._freed(size) or self._fresh(size)
        self._taken += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """The place may be taken again."""
        insort(self._free, slot)
        self._taken -= 1

    def _freed(self, size: int) -> Slot | None:
        """The smallest free place of at least that size, unless half of it or more would idle."""
        index = bisect_left(self._free, (size,))
        if index < len(self._free) and self._free[index].num_bytes < 2 * size:
            return self._free.pop(index)
        return None

    def _fresh(self, size: int) -> Slot:
        """A place at the unused end of a slab, maybe of a new one."""
        fits = (i for i, rest in enumerate(self._rests) if self._slabs[i] - rest >= size)
        slab = next(fits, len(self._slabs))
        if slab == len(self._slabs):
            slab_bytes = max(self._slab_bytes, 1 << (size - 1).bit_length())
            self._add_slab(slab_bytes)
            self._slabs.append(slab_bytes)
            self._rests.append(0)
        offset = self._rests[slab]
        self._rests[slab] += size
        return Slot(size, slab, offset)
