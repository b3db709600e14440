"""Cuts of the gradients, in ready order, with which the last exchange ends first.

Works on ready times, bytes and a cost alone: no model, no trace, no cluster. A cut is the index
after the last gradient of a segment; the last cut is the number of gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.planner.network.fit import Array

Numbers = Sequence[float] | Array
Cuts = tuple[int, ...]
SizeCost = Callable[[Array], ArrayLike]
"""Seconds of one exchange: from an array of bytes to an array of seconds of the same shape. Any
values are allowed: concave, measured, not monotone."""

_ROUNDING = 1e-9


def optimal_cuts(
    ready: Numbers,
    num_bytes: Numbers,
    seconds: SizeCost,
    *,
    borders: Collection[int] = (),
) -> Cuts:
    """The cuts under which the last exchange ends first; of equally good ones the fewest segments.

    Exchanges run one at a time in ready order, as in ``finish_time``. With ``F(0) = 0``,
    ``F(j) = min over i < j of max(F(i), R(i, j)) + C(i, j)`` is the earliest end of the exchanges
    of the first ``j`` gradients, where ``R`` is the latest ready time in a segment and ``C`` its
    cost. An earlier end of a prefix never delays what follows, so the result is exact for any cost
    and any ready times. Takes O(n^2), then O(n^2) for each segment to find the fewest segments.

    Args:
        ready: Seconds at which each gradient is ready, in ready order; need not ascend.
        num_bytes: Bytes of each gradient.
        seconds: The cost of an exchange.
        borders: Indices where a segment must end (the dtype changes there).

    Example:
        >>> optimal_cuts([1.0, 2.0, 3.0], [8, 8, 1], lambda size: 1.0 + 0.1 * size)
        (1, 3)
    """
    if len(ready) == 0:
        return ()
    costs = _costs(np.asarray(num_bytes, dtype=np.float64), seconds, borders)
    latest = _latest_ready(np.asarray(ready, dtype=np.float64))
    earliest = _earliest_end(latest, costs)
    return _fewest(latest, costs, earliest + abs(earliest) * _ROUNDING)


def finish_time(
    cuts: Sequence[int], ready: Numbers, num_bytes: Numbers, seconds: SizeCost
) -> float:
    """When the last exchange ends, if each one starts when the one before has ended.

    Segment ``g`` ends at ``f_g = max(f_{g-1}, R_g) + C_g``, where ``f_0 = 0``.
    Source: Shi, Chu, Li, "MG-WFBP", https://arxiv.org/abs/1811.11141

    Example:
        >>> finish_time((1, 3), [1.0, 2.0, 3.0], [8, 8, 1], lambda size: 1.0 + 0.1 * size)
        4.9
    """
    sizes = np.asarray(num_bytes, dtype=np.float64)
    end = 0.0
    for start, stop in pairwise((0, *cuts)):
        cost = np.asarray(seconds(sizes[start:stop].sum(keepdims=True)))
        end = max(end, float(np.max(ready[start:stop]))) + float(cost[0])
    return end


def improve(
    cuts: Sequence[int], evaluate: Callable[[Cuts], float], *, max_evaluations: int = 400
) -> Cuts:
    """Better cuts near these, where ``evaluate`` gives the seconds of a split (less is better).

    Local search for what the exact program cannot model, such as exchanges that slow down the
    compute they hide behind. A step removes a cut if that is no worse, or moves a cut by 1, 2, 4
    ... gradients or adds one if that is better. It stops where no step helps, or after
    ``max_evaluations``.

    Example:
        >>> improve((3, 9), lambda cuts: abs(sum(cuts[:-1]) - 5) + 0.1 * len(cuts))
        (5, 9)
    """
    best, seen = tuple(cuts), {tuple(cuts)}
    value, better = evaluate(best), True
    while better:
        better = False
        for near in _neighbours(best):
            if near in seen:
                continue
            if len(seen) >= max_evaluations:
                return best
            seen.add(near)
            near_value, margin = evaluate(near), _ROUNDING * abs(value)
            fewer = len(near) < len(best)
            if near_value < value - margin or (fewer and near_value <= value + margin):
                best, value, better = near, near_value, True
                break
    return best


def _neighbours(cuts: Cuts) -> Iterator[Cuts]:
    """Cuts with one removed, one moved, one added: the most promising changes first."""
    positions = range(len(cuts) - 1)
    for position in positions:
        yield cuts[:position] + cuts[position + 1 :]
    for step in (1, 2, 4, 8, 16, 32):
        for position in positions:
            low, high = (0, *cuts)[position], cuts[position + 1]
            for moved in (cuts[position] - step, cuts[position] + step):
                if low < moved < high:
                    yield (*cuts[:position], moved, *cuts[position + 1 :])
    for added in _by_halves(cuts):
        yield tuple(sorted((*cuts, added)))


def _by_halves(cuts: Cuts) -> Iterator[int]:
    """Every index that is not a cut yet: the middle of each segment, then of its halves ..."""
    spans = deque(pairwise((0, *cuts)))
    while spans:
        low, high = spans.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            spans += [(low, middle), (middle, high)]


def _costs(sizes: Array, seconds: SizeCost, borders: Collection[int]) -> Array:
    """Seconds of segment ``[i, j]``; infinite where it is not allowed, and for ``i >= j``."""
    total = np.concatenate([[0.0], np.cumsum(sizes)])  # bytes before each index
    costs = np.full((len(total), len(total)), np.inf)
    for start in range(len(sizes)):
        costs[start, start + 1 :] = seconds(total[start + 1 :] - total[start])
    for border in borders:
        costs[:border, border + 1 :] = np.inf
    return costs


def _latest_ready(ready: Array) -> Array:
    """The latest ready time of gradients ``i .. j - 1``, at ``[i, j]``."""
    not_after = np.tri(len(ready) + 1, dtype=bool)
    times = np.where(not_after, -np.inf, np.concatenate([[0.0], ready]))
    return np.asarray(np.maximum.accumulate(times, axis=1))


def _earliest_end(latest: Array, costs: Array) -> float:
    """When all gradients have been exchanged at the earliest, in however many segments."""
    ends = np.zeros(len(costs))
    for stop in range(1, len(costs)):
        ends[stop] = (np.maximum(ends[:stop], latest[:stop, stop]) + costs[:stop, stop]).min()
    return float(ends[-1])


def _fewest(latest: Array, costs: Array, limit: float) -> Cuts:
    """The fewest segments that end by ``limit``, which is the best end but for rounding.

    In round ``m``, ``ends[j]`` is the earliest end of the first ``j`` gradients in exactly ``m``
    segments. A prefix is extended only if the remaining gradients can still end by ``limit`` and if
    it ends earlier than with fewer segments. Ends before the next gradient is ready count as that
    ready time: being earlier gains nothing.
    """
    count = len(costs) - 1
    next_ready = latest.diagonal(1)
    latest_end = _latest_end(latest, costs, limit)
    ends = np.concatenate([[0.0], np.full(count, np.inf)])
    earliest_so_far = np.full(count, np.inf)
    parents: list[NDArray[np.intp]] = []  # of each round: where the last segment starts
    totals: list[float] = []  # of each round: when all gradients have been exchanged
    active = np.array([0])
    while len(active):
        low = int(active[0]) + 1
        candidates = np.maximum(ends[active, None], latest[active, low:]) + costs[active, low:]
        parent = np.zeros(count + 1, dtype=np.intp)
        parent[low:] = active[candidates.argmin(axis=0)]
        ends = np.full(count + 1, np.inf)
        ends[low:] = candidates.min(axis=0)
        parents.append(parent)
        totals.append(float(ends[count]))
        if totals[-1] <= limit:
            break
        useful = np.maximum(ends[:count], next_ready)
        active = np.flatnonzero((useful < earliest_so_far) & (ends[:count] <= latest_end))
        earliest_so_far = np.minimum(earliest_so_far, useful)
    number = int(np.argmin(totals))
    return walk_back(parents[1 : number + 1], count)


def walk_back(parents: Sequence[NDArray[np.intp]], count: int) -> Cuts:
    """The cuts of a solution from where its second, third ... segment starts, by their ends.

    Example:
        >>> walk_back([np.array([0, 0, 1])], 2)
        (1, 2)
    """
    cuts = [count]
    for parent in reversed(parents):
        cuts.append(int(parent[cuts[-1]]))
    return tuple(reversed(cuts))


def _latest_end(latest: Array, costs: Array, limit: float) -> Array:
    """The latest end of the first ``i`` gradients after which the others can end by ``limit``."""
    count = len(costs) - 1
    slack = _ROUNDING * abs(limit)
    ends = np.full(count + 1, -np.inf)
    ends[count] = limit + slack
    for start in range(count - 1, -1, -1):
        begins = ends[start + 1 :] - costs[start, start + 1 :]
        possible = begins >= latest[start, start + 1 :] - slack
        ends[start] = begins[possible].max(initial=-np.inf)
    return ends[:count]
