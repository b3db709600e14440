"""Ranks that are slower than the others, named while they are.

What a rank takes for an update without waiting for others is its own; a slow link makes all of them
wait, and is not blamed on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

SLOWER = 1.3
"""Times the median of the other ranks from which a rank is slow."""
LOOKS = 3
"""In a row before it is said, and before it is taken back."""


class SlowRanks:
    """Remembers which ranks are slow, and since which update.

    Example:
        >>> slow = SlowRanks()
        >>> for step in (400, 410, 420):
        ...     said = slow.look({0: 0.1, 1: 0.1, 2: 0.17}, step)
        >>> said
        ['rank 2 takes 1.7 times as long for an update as the other ranks, since update 400']
    """

    def __init__(self) -> None:
        self._looks: dict[int, tuple[int, int]] = {}  # by rank: how often in a row, and since when
        self._named: set[int] = set()

    def look(self, seconds: Mapping[int, float], step: int) -> list[str]:
        """Say what is new.

        Args:
            seconds: that each rank takes for an update of its own, waiting left out.
            step: updates so far.
        """
        said = []
        for rank, own in seconds.items():
            others = median(time for other, time in seconds.items() if other != rank)
            is_slow = own > SLOWER * others > 0
            if is_slow == (rank in self._named):
                self._looks.pop(rank, None)
                continue
            count, since = self._looks.get(rank, (0, step))
            self._looks[rank] = count + 1, since
            if count + 1 < LOOKS:
                continue
            del self._looks[rank]
            if is_slow:
                self._named.add(rank)
                many = "ranks" if len(seconds) > 2 else "rank"
                said.append(
                    f"rank {rank} takes {own / others:.1f} times as long for an update as the "
                    f"other {many}, since update {since}"
                )
            else:
                self._named.discard(rank)
                said.append(f"rank {rank} is as fast as the others again, since update {since}")
        return said
