"""What a split would cost: when its exchanges end in a model of one queue, and its best splits.

Never measures and never sees a trace: times and sizes in, cuts out. Advice needs no more; what a
cluster beyond one queue does to a split is the planner's matter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from statistics import linear_regression
from typing import Any

from slipstream.trace.intervals import Interval

Cuts = tuple[int, ...]
"""How many gradients come before the end of each segment; the last one: all of them."""

Cost = Callable[[float], float]
"""Seconds of one all-reduce over the bytes of its tensor on one rank."""

ENOUGH = 0.005
"""As good as the best is what ends no later than by this share: fewer segments are better."""

MOST = 16
"""Segments that are tried."""

BORDERS = 200
"""Places of cuts that are tried."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Gradients in ready order, and a network that carries one segment at a time, in order.

    ``ready[i]`` is when the last rank has gradient ``i``, in seconds from the start of backward,
    and no earlier than its predecessors; ``bytes_before[i]`` is what all gradients before it weigh.
    """

    ready: tuple[float, ...]
    bytes_before: tuple[int, ...]
    seconds_of: Cost

    @classmethod
    def of(cls, ready: Sequence[float], num_bytes: Sequence[int], seconds_of: Cost) -> Queue:
        """A queue of gradients that come at any times: a segment is as late as its latest."""
        in_order = tuple(accumulate(ready, max))
        return cls(in_order, tuple(accumulate(num_bytes, initial=0)), seconds_of)

    def finish(self, cuts: Cuts) -> float:
        """When the last exchange ends: ``f_g = max(f_(g-1), ready_g) + seconds_of(bytes_g)``.

        Source: Shi, Chu, Li, "MG-WFBP", https://arxiv.org/abs/1811.11141

        Example:
            >>> queue = Queue.of((1.0, 2.0, 3.0), (20, 10, 10), lambda size: 0.5 + size / 10)
            >>> queue.finish((3,)), queue.finish((1, 3))
            (7.5, 6.0)
        """
        end, before = 0.0, 0
        for cut in cuts:
            weight = self.bytes_before[cut]
            end = max(end, self.ready[cut - 1]) + self.seconds_of(weight - before)
            before = weight
        return end

    def total(self, cuts: Cuts) -> float:
        """How long the exchanges take, one after the other without a gap."""
        return sum(map(self.seconds_of, self.sizes_of(cuts)))

    def sizes_of(self, cuts: Cuts) -> list[int]:
        """Bytes of the segments of a split."""
        borders = (0, *cuts)
        return [self.bytes_before[b] - self.bytes_before[a] for a, b in pairwise(borders)]

    def splits(self, most: int = MOST) -> list[Cuts]:
        """The best split into 1, 2, 3 ... segments, as far as more of them pay.

        ``F(m, j) = min over i of max(F(m - 1, i), ready_j) + seconds_of(bytes from i to j)``, where
        ``F(m, j)`` is when ``m`` segments of the first ``j`` gradients end. Of a model with many
        gradients only ``BORDERS`` borders are tried.

        Example:
            >>> queue = Queue.of((1.0, 2.0, 3.0), (20, 10, 10), lambda size: 0.5 + size / 10)
            >>> queue.splits()
            [(3,), (1, 3)]
        """
        borders = self._borders()
        weights = [self.bytes_before[border] for border in (0, *borders)]
        ready = [self.ready[border - 1] for border in borders]
        seconds = [[self.seconds_of(b - a) for a in weights[:j]] for j, b in enumerate(weights)][1:]
        ends = [time + row[0] for time, row in zip(ready, seconds, strict=True)]
        cuts: list[Cuts] = [(border,) for border in borders]
        found = [(ends[-1], cuts[-1])]
        for done in range(min(most, len(borders)) - 1):  # borders before it lie in other segments
            sooner, shorter = ends, cuts
            ends, cuts = [inf] * len(borders), list(cuts)
            for j in range(done + 1, len(borders)):
                tried = [max(sooner[i], ready[j]) + seconds[j][i + 1] for i in range(done, j)]
                ends[j] = min(tried)
                cuts[j] = (*shorter[done + tried.index(ends[j])], borders[j])
            found.append((ends[-1], cuts[-1]))
        enough = (1 + ENOUGH) * min(end for end, _ in found)
        few = next(index for index, (end, _) in enumerate(found) if end <= enough)
        return [split for _, split in found[: few + 1]]

    def _borders(self) -> list[int]:
        """Where cuts may be: everywhere, or at borders that share out the bytes evenly."""
        count, total = len(self.ready), self.bytes_before[-1]
        if count <= BORDERS:
            return list(range(1, count + 1))
        marks = (total * (index + 1) / BORDERS for index in range(BORDERS - 1))
        places = {bisect_left(self.bytes_before, mark, lo=1, hi=count) for mark in marks}
        return sorted(places | {count})


def by_index(cuts: Cuts) -> dict[str, Any]:
    """The patch that makes this split.

    Example:
        >>> by_index((2, 5))
        {'gradients': {'split': {'kind': 'by_index', 'last': [1, 4]}}}
    """
    return {"gradients": {"split": {"kind": "by_index", "last": [cut - 1 for cut in cuts]}}}


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Cost:
    """The line ``startup + per_byte * size`` of least squares, neither of the two below zero.

    Example:
        >>> cost = fit([10, 20, 40], [3.0, 5.0, 9.0])
        >>> round(cost(30), 6)
        7.0
    """
    startup, per_byte = 0.0, 0.0
    if len(set(sizes)) > 1:
        per_byte, startup = linear_regression(sizes, seconds)
    if startup <= 0 and any(sizes):
        startup, per_byte = 0.0, sum(seconds) / sum(sizes)
    if per_byte < 0 or not any(sizes):
        startup, per_byte = sum(seconds) / len(seconds), 0.0
    return lambda size: startup + per_byte * size


def shares(spans: Sequence[Interval]) -> list[float]:
    """How much of the network's time each span had, where spans that overlap share it evenly.

    The sum is the time in which anything ran.

    Example:
        >>> shares([(0.0, 4.0), (2.0, 3.0)])
        [3.5, 0.5]
    """
    had = [0.0] * len(spans)
    for low, high in pairwise(sorted({edge for span in spans for edge in span})):
        running = [i for i, (start, end) in enumerate(spans) if start <= low and high <= end]
        for index in running:
            had[index] += (high - low) / len(running)
    return had
