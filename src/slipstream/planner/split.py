"""Where to cut the ready order into segments, so that the last exchange ends first.

Never sees a model, a trace or a cluster: ready times, bytes and a cost go in, cuts come out. A cut
is the index after the last gradient of a segment; the last cut is the number of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Cuts = tuple[int, ...]
Cost = Callable[[Array], ArrayLike] | Array
"""Seconds of one exchange: a function from an array of bytes to an array of seconds, or a table of
``n + 1`` rows and columns that holds at ``[i, j]`` the seconds of the segment of gradients
``i .. j - 1``. Both may be anything: concave, measured, not even monotone."""

_ROUNDING = 1e-9


def optimal_cuts(
    ready: Sequence[float] | Array,
    num_bytes: Sequence[int] | Array,
    seconds: Cost,
    *,
    borders: Collection[int] = (),
    cap_bytes: float | None = None,
    compute_overhead: float = 0.0,
    tolerance: float = 0.0,
) -> Cuts:
    """The cuts under which the last exchange ends first; the fewest segments if several do.

    Exchanges run one at a time in ready order, as in ``finish_time``. With ``F(0) = 0``,
    ``F(j) = min over i < j of max(F(i), R(i, j)) + C(i, j)`` is the earliest end of the exchanges
    of the first ``j`` gradients, where ``R`` is the latest ready time in a segment and ``C`` its
    cost: an earlier end of what comes before never makes what follows later, so this is exact for
    any cost and any ready times. O(n^2), then O(n^2) for each segment to find the fewest of them.

    Args:
        ready: seconds at which each gradient is there, in ready order; need not ascend.
        num_bytes: bytes of each gradient.
        seconds: what an exchange costs.
        borders: places where there must be a cut (another dtype begins).
        cap_bytes: most bytes of a segment; a larger gradient is a segment of its own.
        compute_overhead: seconds that each segment costs the thread that computes: segment ``m``
            and all behind it are ready ``m`` times as much later.
        tolerance: how much later, as a share, the end may come if that saves segments.

    Example:
        >>> optimal_cuts([1.0, 2.0, 3.0], [8, 8, 1], lambda size: 1.0 + 0.1 * size)
        (1, 3)
    """
    ready_at = np.asarray(ready, dtype=np.float64)
    count = len(ready_at)
    if count == 0:
        return ()
    costs = _costs(np.asarray(num_bytes, dtype=np.float64), seconds, borders, cap_bytes)
    latest = _latest_ready(ready_at)
    first = _earliest(latest, costs)
    deadline = _finish(first, latest, costs, compute_overhead)
    limit = deadline + abs(deadline) * (tolerance + _ROUNDING)
    return _fewest(latest, costs, limit, compute_overhead, tolerance)


def finish_time(
    cuts: Sequence[int],
    ready: Sequence[float] | Array,
    num_bytes: Sequence[int] | Array,
    seconds: Cost,
    *,
    compute_overhead: float = 0.0,
) -> float:
    """When the last of the exchanges ends, if each starts when the one before has ended.

    Segment ``g`` ends at ``f_g = max(f_{g-1}, R_g) + C_g``, where ``f_0 = 0``.

    Example:
        >>> finish_time((1, 3), [1.0, 2.0, 3.0], [8, 8, 1], lambda size: 1.0 + 0.1 * size)
        4.9
    """
    sizes = np.asarray(num_bytes, dtype=np.float64)
    end = 0.0
    for number, (start, stop) in enumerate(pairwise((0, *cuts)), 1):
        if callable(seconds):
            cost = float(np.asarray(seconds(sizes[start:stop].sum(keepdims=True)))[0])
        else:
            cost = float(seconds[start, stop])
        end = max(end, float(np.max(ready[start:stop])) + number * compute_overhead) + cost
    return end


def lower_bound(
    ready: Sequence[float] | Array,
    num_bytes: Sequence[int] | Array,
    startup: float,
    per_byte: float,
) -> float:
    """No cuts end before this where an exchange costs ``startup + per_byte * bytes``.

    What is not there before gradient ``k`` is, and all behind it, must be sent after that:
    ``startup + max over k of max(0, ready_k) + per_byte * bytes of gradients k .. n``.

    Example:
        >>> lower_bound([1.0, 2.0, 3.0], [8, 8, 1], 1.0, 0.1)
        4.1
    """
    from_here = np.cumsum(np.asarray(num_bytes, dtype=np.float64)[::-1])[::-1]
    starts = np.maximum(np.asarray(ready, dtype=np.float64), 0.0)
    return startup + float(np.max(starts + per_byte * from_here))


def improve(
    cuts: Sequence[int],
    evaluate: Callable[[Cuts], float],
    *,
    borders: Collection[int] = (),
    max_evaluations: int = 400,
) -> Cuts:
    """Better cuts near these, as far as ``evaluate`` (seconds, less is better) tells.

    Local search: a cut is taken away if that is no worse; moved by 1, 2, 4 ... gradients or added
    if that is better. Ends where nothing near is better, or after ``max_evaluations``. For what
    the exact program cannot know: an exchange that slows the compute it hides behind. Never takes
    away a cut of ``borders``.

    Example:
        >>> improve((3, 9), lambda cuts: abs(sum(cuts[:-1]) - 5) + 0.1 * len(cuts))
        (5, 9)
    """
    best = tuple(cuts)
    value, left = evaluate(best), max_evaluations - 1
    seen = {best}
    better = True
    while better:
        better = False
        for near in _neighbours(best, frozenset(borders)):
            if near in seen:
                continue
            if left <= 0:
                return best
            seen.add(near)
            left -= 1
            found = evaluate(near)
            margin = _ROUNDING * abs(value)
            if found < value - margin or (len(near) < len(best) and found <= value + margin):
                best, value, better = near, found, True
                break
    return best


def _neighbours(cuts: Cuts, borders: frozenset[int]) -> Iterator[Cuts]:
    """Cuts less one, with one moved, with one more: what is likely to help comes first."""
    free = [position for position, cut in enumerate(cuts[:-1]) if cut not in borders]
    for position in free:
        yield cuts[:position] + cuts[position + 1 :]
    for step in (1, 2, 4, 8, 16, 32):
        for position in free:
            low, high = (0, *cuts)[position], cuts[position + 1]
            for moved in (cuts[position] - step, cuts[position] + step):
                if low < moved < high:
                    yield (*cuts[:position], moved, *cuts[position + 1 :])
    for added in _by_halves(cuts):
        yield tuple(sorted((*cuts, added)))


def _by_halves(cuts: Cuts) -> Iterator[int]:
    """Every index that is no cut yet: the middles of all segments, then of their halves ..."""
    spans = list(pairwise((0, *cuts)))
    while spans:
        halves = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                yield middle
                halves += [(low, middle), (middle, high)]
        spans = halves


def _costs(sizes: Array, seconds: Cost, borders: Collection[int], cap_bytes: float | None) -> Array:
    """Seconds of each segment ``[i, j]``; infinite where it is not allowed, and for ``i >= j``."""
    count = len(sizes)
    behind = np.concatenate([[0.0], np.cumsum(sizes)])
    costs = np.full((count + 1, count + 1), np.inf, order="F")
    for stop in range(1, count + 1):
        if callable(seconds):
            costs[:stop, stop] = seconds(behind[stop] - behind[:stop])
        else:
            costs[:stop, stop] = seconds[:stop, stop]
        if cap_bytes is not None:
            over = behind[stop] - behind[: stop - 1] > cap_bytes
            costs[: stop - 1, stop][over] = np.inf
    for border in borders:
        costs[:border, border + 1 :] = np.inf
    return costs


def _latest_ready(ready: Array) -> Array:
    """At ``[i, j]`` the latest ready time of gradients ``i .. j - 1``."""
    count = len(ready)
    latest = np.full((count + 1, count + 1), -np.inf, order="F")
    for stop in range(1, count + 1):
        np.maximum(latest[:stop, stop - 1], ready[stop - 1], out=latest[:stop, stop])
    return latest


def _earliest(latest: Array, costs: Array) -> Cuts:
    """Cuts of the earliest end, without a thought of how many they are."""
    count = len(costs) - 1
    ends, before = np.zeros(count + 1), np.zeros(count + 1, dtype=np.intp)
    for stop in range(1, count + 1):
        found = np.maximum(ends[:stop], latest[:stop, stop]) + costs[:stop, stop]
        before[stop] = np.argmin(found)
        ends[stop] = found[before[stop]]
    cuts = [count]
    while before[cuts[-1]]:
        cuts.append(int(before[cuts[-1]]))
    return tuple(reversed(cuts))


def _finish(cuts: Cuts, latest: Array, costs: Array, overhead: float) -> float:
    end = 0.0
    for number, (start, stop) in enumerate(pairwise((0, *cuts)), 1):
        end = max(end, float(latest[start, stop]) + number * overhead) + float(costs[start, stop])
    return end


def _fewest(latest: Array, costs: Array, limit: float, overhead: float, tolerance: float) -> Cuts:
    """The fewest segments that end within ``tolerance`` of the best, which ends by ``limit``.

    ``ends[j]`` is the earliest end of the first ``j`` gradients in exactly ``m`` segments. Only
    those prefixes go on that end early enough for the rest, and earlier than with fewer segments;
    what ends before the next gradient is ready might as well end when it is.
    """
    count = len(costs) - 1
    latest, costs = np.ascontiguousarray(latest), np.ascontiguousarray(costs)
    next_ready = latest.diagonal(1)
    latest_end = _latest_end(latest, costs, limit)
    ends = np.full(count + 1, np.inf)
    ends[0] = 0.0
    least = np.full(count, np.inf)
    parents: list[NDArray[np.intp]] = []
    of_all: list[float] = []
    active = np.array([0])
    while len(active):
        number = len(parents) + 1
        low = int(active[0]) + 1
        rows = latest[active, low:] + number * overhead
        found = np.maximum(ends[active, None], rows) + costs[active, low:]
        choice = np.argmin(found, axis=0)
        parent = np.zeros(count + 1, dtype=np.intp)
        parent[low:] = active[choice]
        ends = np.full(count + 1, np.inf)
        ends[low:] = found[choice, np.arange(count + 1 - low)]
        parents.append(parent)
        of_all.append(float(ends[count]))
        if overhead == 0.0 and of_all[-1] <= limit:
            break
        enough = np.maximum(ends[:count], next_ready)
        active = np.flatnonzero((enough < least) & (ends[:count] <= latest_end))
        least = np.minimum(least, enough)
    best = min(of_all)
    bound = limit if overhead == 0.0 else best + abs(best) * (tolerance + _ROUNDING)
    number = next(m for m, end in enumerate(of_all) if end <= bound)
    cuts = [count]
    for parent in reversed(parents[1 : number + 1]):
        cuts.append(int(parent[cuts[-1]]))
    return tuple(reversed(cuts))


def _latest_end(latest: Array, costs: Array, limit: float) -> Array:
    """The latest end of the first ``i`` gradients after which the rest can end by ``limit``."""
    count = len(costs) - 1
    slack = _ROUNDING * abs(limit)
    ends = np.full(count + 1, -np.inf)
    ends[count] = limit + slack
    for start in range(count - 1, -1, -1):
        begins = ends[start + 1 :] - costs[start, start + 1 :]
        possible = begins >= latest[start, start + 1 :] - slack
        ends[start] = begins[possible].max(initial=-np.inf)
    return ends[:count]
