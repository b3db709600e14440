"""Predicts when the exchanges of a split end, on a network that carries one segment at a time.

Enough for advice; what contention does to a split is the planner's matter (``planner.simulate``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import linear_regression
from typing import NamedTuple

import numpy as np

from slipstream.planner.split import Cuts, SizeCost, finish_time, optimal_cuts
from slipstream.trace.intervals import Interval

MAX_SEGMENTS = 16
"""Splits into more segments are not tried."""

MAX_POSITIONS = 200
"""Of a model with more gradients, cuts are tried at this many positions only."""


class SplitModel(NamedTuple):
    """Gradients in ready order, and the cost of an exchange of their network.

    Attributes:
        ready: When the last rank has each gradient and all before it, in seconds; never falls.
        num_bytes: Of each gradient.
        seconds_of: The cost of an all-reduce, over the bytes of its tensor on one rank.
    """

    ready: Sequence[float]
    num_bytes: Sequence[int]
    seconds_of: SizeCost

    def finish(self, cuts: Cuts) -> float:
        """When the last exchange ends (``planner.split.finish_time``)."""
        return finish_time(cuts, self.ready, self.num_bytes, self.seconds_of)

    def seconds(self, sizes: Sequence[int]) -> float:
        """Seconds of exchanges of these bytes, one after the other without a gap."""
        return float(np.sum(self.seconds_of(np.array(sizes, dtype=np.float64))))

    def sizes_of(self, cuts: Sequence[int]) -> list[int]:
        """Bytes of the segments of a split."""
        return [sum(self.num_bytes[start:stop]) for start, stop in pairwise((0, *cuts))]

    def best_cuts(self, max_segments: int = MAX_SEGMENTS, tolerance: float = 0.0) -> Cuts:
        """The split that ends first; the fewest segments that end within ``tolerance`` of it.

        Example:
            >>> model = SplitModel((1.0, 2.0, 3.0), (20, 10, 10), lambda size: 0.5 + size / 10)
            >>> model.best_cuts(), model.best_cuts(max_segments=1)
            ((1, 3), (3,))
        """
        stops = self._positions()  # the problem is solved for the groups of gradients in between
        cuts = optimal_cuts(
            [self.ready[stop - 1] for stop in stops],
            self.sizes_of(stops),
            self.seconds_of,
            tolerance=tolerance,
            max_segments=max_segments,
        )
        return tuple(stops[cut - 1] for cut in cuts)

    def _positions(self) -> list[int]:
        """Where cuts are tried: after every gradient, or at even shares of the bytes."""
        count = len(self.ready)
        if count <= MAX_POSITIONS:
            return list(range(1, count + 1))
        before = [0, *accumulate(self.num_bytes)]
        marks = (before[-1] * (index + 1) / MAX_POSITIONS for index in range(MAX_POSITIONS - 1))
        return sorted({bisect_left(before, mark, lo=1, hi=count) for mark in marks} | {count})


def fitted_line(sizes: Sequence[float], seconds: Sequence[float]) -> SizeCost:
    """The least-squares line ``startup + per_byte * size``, with neither of the two negative.

    A trace has a handful of sizes, often one; ``planner.fit`` needs measured points of many.

    Example:
        >>> cost = fitted_line([10, 20, 40], [3.0, 5.0, 9.0])
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


def time_shares(spans: Sequence[Interval]) -> list[float]:
    """Seconds of network time of each span; spans that overlap share that time evenly.

    The sum is the time in which any of them ran.

    Example:
        >>> time_shares([(0.0, 4.0), (2.0, 3.0)])
        [3.5, 0.5]
    """
    shares = [0.0] * len(spans)
    for low, high in pairwise(sorted({edge for span in spans for edge in span})):
        running = [i for i, (start, end) in enumerate(spans) if start <= low and high <= end]
        for index in running:
            shares[index] += (high - low) / len(running)
    return shares
