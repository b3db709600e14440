"""Deal items of different costs to ranks, so that all take about as long."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError

DealtItems = list[list[int]]
"""The numbers of the items of each rank, ascending."""

_Part = tuple[float, list[int]]


def deal(costs: npt.ArrayLike, speeds: Sequence[float]) -> DealtItems:
    """Deal items so that the sum of a rank's costs over its speed is about the same on all.

    - equal speeds: the largest differencing method of Karmarkar and Karp, for many parts: two
      partial deals are merged, the heavy parts of one with the light ones of the other, until one
      is left.
    - other speeds: items by falling cost, each to the rank that would end with it first.

    Args:
        costs: of the items, each 0 or more.
        speeds: of the ranks, relative, each more than 0.

    Returns:
        For each rank at least one item, if there are as many as ranks.

    Raises:
        UsageError: a cost or a speed that is not allowed.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982); Graham,
    "Bounds on Multiprocessing Timing Anomalies" (1969).

    Example:
        >>> deal([8, 7, 6, 5, 4], [1, 1])
        [[0, 2], [1, 3, 4]]
        >>> deal([1, 1, 1], [2, 1])
        [[0, 1], [2]]
    """
    found = np.asarray(costs, dtype=np.float64)
    _check(found, speeds)
    if len(set(speeds)) == 1:
        return _difference(found, len(speeds))
    return _longest_first(found, np.asarray(speeds, dtype=np.float64))


def deal_padded(costs: npt.ArrayLike, speeds: Sequence[float]) -> DealtItems:
    """Deal items that are padded to the costliest of their rank: a rank takes the number of its
    items times the cost of the costliest.

    Each rank gets a run of the items by cost, so that padding is small; the runs are the ones that
    make the slowest rank fastest.

    Raises:
        UsageError: as `deal`, or fewer items than ranks.

    Example:
        >>> deal_padded([1, 1, 1, 1, 4], [1, 1])
        [[4], [0, 1, 2, 3]]
    """
    found = np.asarray(costs, dtype=np.float64)
    _check(found, speeds)
    if len(found) < len(speeds):
        raise UsageError(f"{len(found)} items for {len(speeds)} ranks; allowed: one each or more")
    order = np.argsort(-found, kind="stable")
    falling = found[order]
    # a little more than all items take on the slowest rank, as quotients are rounded
    low, high = 0.0, float(len(found) * falling[0] / min(speeds)) * (1 + 1e-9)
    for _ in range(60):  # to the last bit of a double, nearly
        middle = (low + high) / 2
        if _runs(falling, speeds, middle) is None:
            low = middle
        else:
            high = middle
    counts = _runs(falling, speeds, high)
    assert counts is not None
    ends = np.cumsum(counts)
    return [sorted(order[e - c : e].tolist()) for c, e in zip(counts, ends, strict=True)]


def _runs(
    falling: npt.NDArray[np.float64], speeds: Sequence[float], limit: float
) -> list[int] | None:
    """Count the items that each rank takes within a limit of time; None: some are left over."""
    counts, taken = [], 0
    for number, speed in enumerate(speeds):
        left = len(falling) - taken
        others = len(speeds) - number - 1
        costliest = float(falling[taken])
        fit = int(min(limit * speed / costliest, left)) if costliest > 0 else left
        if fit < 1:
            return None
        counts.append(min(fit, left - others))
        taken += counts[-1]
    return counts if taken == len(falling) else None


def _difference(costs: npt.NDArray[np.float64], parts: int) -> DealtItems:
    """Merge partial deals until one is left; each item begins as one, in its first part."""
    numbers = count()
    order = np.argsort(-costs, kind="stable").tolist()
    heap: list[tuple[float, int, list[_Part]]] = []
    for item in order:
        some: list[_Part] = [(float(costs[item]), [item])]
        some += [(0.0, []) for _ in range(parts - 1)]
        heapq.heappush(heap, (some[-1][0] - some[0][0], next(numbers), some))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a + b, items + more)
            for (a, items), (b, more) in zip(one, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], len(part[1])))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(numbers), merged))
    dealt = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
    return _none_empty(sorted(dealt, key=lambda items: items[:1] or [len(costs)]), costs)


def _longest_first(costs: npt.NDArray[np.float64], speeds: npt.NDArray[np.float64]) -> DealtItems:
    loads = np.zeros(len(speeds))
    parts: DealtItems = [[] for _ in speeds]
    for item in np.argsort(-costs, kind="stable").tolist():
        rank = int(np.argmin((loads + costs[item]) / speeds))
        loads[rank] += costs[item]
        parts[rank].append(item)
    return _none_empty([sorted(items) for items in parts], costs)


def _none_empty(parts: DealtItems, costs: npt.NDArray[np.float64]) -> DealtItems:
    """Give ranks without an item the cheapest one of a rank that has several."""
    for items in parts:
        if not items and len(costs) >= len(parts):
            most = max(parts, key=len)
            cheapest = min(most, key=lambda item: float(costs[item]))
            most.remove(cheapest)
            items.append(cheapest)
    return parts


def _check(costs: npt.NDArray[np.float64], speeds: Sequence[float]) -> None:
    if costs.ndim != 1 or not np.isfinite(costs).all() or (costs < 0).any():
        raise UsageError("a cost is below 0, infinite or not a number; allowed: 0 or more")
    if not speeds or min(speeds) <= 0:
        raise UsageError(f"speeds are {list(speeds)}; allowed: more than 0, one for each rank")
