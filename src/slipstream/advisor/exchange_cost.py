"""Fits the cost of an exchange to the exchanges of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import linear_regression

from slipstream.planner.split import SizeCost
from slipstream.trace.intervals import Interval


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
