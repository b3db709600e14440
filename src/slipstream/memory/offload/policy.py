"""Which blocks' activations leave, and which are brought back when.

Pure: knows positions of blocks in a forward, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Policy(NamedTuple):
    """The last blocks stay, as backward needs them at once; each block fetches those before it.

    Example:
        >>> policy = Policy(keep_last=2, prefetch=1)
        >>> [policy.leaves(position, saving=range(5)) for position in range(5)]
        [True, True, True, False, False]
        >>> policy.ahead(4, away=[0, 2]), policy.ahead(2, away=[0, 2]), policy.ahead(0, away=[0, 2])
        ([2], [0], [])
    """

    keep_last: int
    prefetch: int

    def leaves(self, position: int, saving: Iterable[int]) -> bool:
        """Whether the activations of a block go away, where blocks at ``saving`` have some."""
        return sum(later > position for later in saving) >= self.keep_last

    def ahead(self, position: int, away: Iterable[int]) -> list[int]:
        """Blocks to fetch, in this order, when backward reaches a block."""
        return sorted((p for p in away if p < position), reverse=True)[: self.prefetch]
