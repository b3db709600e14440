"""Which blocks' activations leave, and which are brought back when.

Pure: knows positions of blocks in a forward, no tensors.
"""

from __future__ import annotations

from typing import NamedTuple


class Policy(NamedTuple):
    """The last blocks stay, as backward needs them at once; each block fetches those before it.

    Example:
        >>> policy = Policy(blocks=6, keep_last=2, prefetch=2)
        >>> [policy.leaves(position) for position in range(6)]
        [True, True, True, True, False, False]
        >>> [list(policy.ahead(position)) for position in (5, 4, 3, 1, 0)]
        [[3], [3, 2], [2, 1], [0], []]
    """

    blocks: int
    keep_last: int
    prefetch: int

    def leaves(self, position: int) -> bool:
        """Whether the activations of a block go away in forward."""
        return position < self.blocks - self.keep_last

    def ahead(self, position: int) -> list[int]:
        """Blocks to fetch, in this order, when backward reaches a block."""
        before = range(position - 1, max(position - 1 - self.prefetch, -1), -1)
        return [earlier for earlier in before if self.leaves(earlier)]
