"""Fit lines to measured points: continuous and piecewise affine, seconds over bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PENALTY = 0.01
"""Squared relative error that another line must save: that of three points 6 % off."""

LEAST_POINTS = 3
"""Points of a line; a line through two of them would have no error at all."""

_SWEEPS = 100
_AROUND = 4  # places on either side of a knot; there are twice as many places as sizes


class Line(NamedTuple):
    """``startup + slope * bytes`` for the points ``first <= i < stop``."""

    first: int
    stop: int
    startup: float
    slope: float


def segmented_fit(sizes: Array, times: Array) -> tuple[Array, Array, Array]:
    """Knots, startups and slopes of the lines through ``times`` at ascending ``sizes``.

    Minimises ``sum(((fit - times) / times)**2) + PENALTY * lines``: first with lines that need not
    meet, by an exact dynamic program over the places to cut; then with as many lines that do meet,
    by moving their knots. Fitted times never fall with size, and times per byte never rise:
    startups and slopes are not negative.

    Example:
        >>> sizes = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
        >>> knots, startups, slopes = segmented_fit(sizes, np.maximum(4.0, sizes))
        >>> knots.round(), startups.round(), slopes.round()
        (array([1., 4.]), array([4., 0.]), array([0., 1.]))
    """
    lines = _free_lines(sizes, times)
    knots = [sizes[0]]
    for before, line in pairwise(lines):
        low, high = sizes[before.stop - 1], sizes[line.first]
        steeper = line.slope - before.slope
        meet = (before.startup - line.startup) / steeper if steeper else 0.0
        knots.append(meet if low <= meet <= high else np.sqrt(low * high))
    ends = _moved(sizes, times, np.array([*knots, sizes[-1]]))
    values = _joined(sizes, times, ends)
    slopes = np.diff(values) / np.diff(ends)
    return ends[:-1], np.maximum(values[:-1] - slopes * ends[:-1], 0.0), slopes


def _free_lines(sizes: Array, times: Array) -> list[Line]:
    """The best division of the points into lines, each fitted to its own points alone."""
    count = len(sizes)
    least = min(LEAST_POINTS, count)
    one, x = 1.0 / times, sizes / times
    terms = np.stack([np.ones(count), one, x, one * one, one * x, x * x])
    best: list[tuple[float, list[Line]]] = [(0.0, [])]
    best += [(np.inf, [])] * count
    for end in range(least, count + 1):
        sums = terms[:, end - 1 :: -1].cumsum(axis=1)[:, ::-1]
        startups, slopes, errors = _lines(sums[:, : end - least + 1])  # by first point
        totals = errors + PENALTY + [before for before, _ in best[: end - least + 1]]
        at = int(totals.argmin())
        line = Line(at, end, float(startups[at]), float(slopes[at]))
        best[end] = float(totals[at]), [*best[at][1], line]
    return best[count][1]


def _lines(sums: Array) -> tuple[Array, Array, Array]:
    """Startups, slopes and errors of the lines of least squared relative error.

    Computed from sums over their points. A startup or slope that would be negative is 0, and the
    other one is fitted alone.
    """
    count, one, x, one_one, one_x, x_x = sums
    whole = one_one * x_x - one_x**2
    whole = np.where(whole > 1e-12 * one_one * x_x, whole, np.inf)  # inf: nearly equal sizes
    startup, slope = (one * x_x - x * one_x) / whole, (x * one_one - one * one_x) / whole
    level, steep = one**2 / one_one, x**2 / x_x  # squares explained by either alone
    free = (startup > 0) & (slope > 0)
    flat = ~free & (level >= steep)
    startup = np.where(free, startup, np.where(flat, one / one_one, 0.0))
    slope = np.where(free, slope, np.where(flat, 0.0, x / x_x))
    return startup, slope, np.maximum(count - startup * one - slope * x, 0.0)


def _moved(sizes: Array, times: Array, ends: Array) -> Array:
    """``ends`` with each inner knot moved to the place near it where the error is least."""

    def error(ends: Array) -> float:
        fitted = np.interp(sizes, ends, _joined(sizes, times, ends))
        return float(np.sum((fitted / times - 1.0) ** 2))

    places = np.sort(np.concatenate([sizes, np.sqrt(sizes[1:] * sizes[:-1])]))
    least = error(ends)
    for i in [*range(1, len(ends) - 1)] * 2:
        at = int(np.searchsorted(places, ends[i]))
        for place in places[max(at - _AROUND, 0) : at + _AROUND]:
            moved = ends.copy()
            moved[i] = place
            counts = np.histogram(sizes, moved)[0] if (np.diff(moved) > 0).all() else np.zeros(1)
            if counts.min() >= 2 and (candidate := error(moved)) < least:
                ends, least = moved, candidate
    return ends


def _joined(sizes: Array, times: Array, ends: Array) -> Array:
    """Values at ``ends`` of the best lines that meet there: a quadratic program in dual form.

    Hildreth's method sets one multiplier at a time to the value at which its constraint holds.
    Constraints: the values ascend, and the values per byte descend.
    """
    scale = np.interp(ends, sizes, times)
    hats = np.stack([np.interp(sizes, ends, row) for row in np.eye(len(ends))], axis=1)
    columns = hats * scale / times[:, None]
    ahead, behind = np.eye(len(ends))[1:], np.eye(len(ends))[:-1]
    rising = (ahead - behind) * scale
    cheaper = (behind - ahead * (ends[:-1] / ends[1:])[:, None]) * scale
    limits = np.concatenate([rising, cheaper])
    limits /= np.linalg.norm(limits, axis=1, keepdims=True)
    inverse = np.linalg.inv(columns.T @ columns)
    free = inverse @ columns.sum(axis=0)
    coupling, slack = limits @ inverse @ limits.T, limits @ free
    pressure = np.zeros(len(limits))
    for _ in range(_SWEEPS):
        before = pressure.copy()
        for i in range(len(limits)):
            step = (slack[i] + coupling[i] @ pressure) / coupling[i, i]
            pressure[i] = max(0.0, pressure[i] - step)
        if np.abs(pressure - before).max() <= 1e-10:
            break
    values = np.maximum((free + inverse @ limits.T @ pressure) * scale, 0.0)
    for i in range(1, len(values)):  # rounding may violate the limits a little
        values[i] = np.clip(values[i], values[i - 1], values[i - 1] * ends[i] / ends[i - 1])
    return np.asarray(values)
