"""Arithmetic on sorted, disjoint intervals of time: union, difference, length, lanes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = tuple[Interval, ...]
"""Sorted and disjoint, none of them empty."""


def union(spans: Iterable[Interval]) -> Intervals:
    """The points inside any of the spans, which may overlap and be in any order.

    Example:
        >>> union([(4, 5), (0, 2), (1, 3), (7, 7)])
        ((0, 3), (4, 5))
    """
    merged: list[Interval] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def subtract(whole: Intervals, holes: Intervals) -> Intervals:
    """The points of ``whole`` outside ``holes``.

    Example:
        >>> subtract(((0, 4), (6, 8)), ((1, 2), (3, 7)))
        ((0, 1), (2, 3), (7, 8))
    """
    remaining: list[Interval] = []
    for start, end in whole:
        for low, high in touching(holes, start, end):
            if low > start:
                remaining.append((start, low))
            start = min(high, end)
        if start < end:
            remaining.append((start, end))
    return tuple(remaining)


def touching(intervals: Intervals, start: float, end: float) -> Intervals:
    """The intervals with points between ``start`` and ``end``.

    Example:
        >>> touching(((0, 1), (2, 4), (5, 6), (8, 9)), 3, 6)
        ((2, 4), (5, 6))
    """
    first = bisect_right(intervals, start, key=lambda interval: interval[1])
    stop = bisect_left(intervals, end, key=lambda interval: interval[0])
    return intervals[first:stop]


def length(intervals: Intervals) -> float:
    """The sum of the lengths.

    Example:
        >>> length(((0, 3), (4, 5)))
        4
    """
    return sum(end - start for start, end in intervals)


def lanes(spans: Sequence[Interval]) -> list[int]:
    """A lane for each span, such that spans in a lane do not overlap; as few lanes as possible.

    Example:
        >>> lanes([(0, 2), (1, 3), (2, 4)])
        [0, 1, 0]
    """
    ends: list[float] = []
    lane_of = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[index]
        free = next((lane for lane, busy in enumerate(ends) if busy <= start), len(ends))
        ends[free : free + 1] = [end]
        lane_of[index] = free
    return lane_of
