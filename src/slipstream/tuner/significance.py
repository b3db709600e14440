"""Proof by paired ratios: two strategies in alternation, the time of one over the other's."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

LEAST_PAIRS, MOST_PAIRS = 3, 9


def is_faster(ratios: Sequence[float]) -> bool:
    """Whether the ratios prove, beyond the noise, that the first of each pair is faster.

    The whole 95 % confidence interval of their median must lie below 1; of fewer than six ratios,
    which have no such interval, all must.

    Example:
        >>> is_faster([0.9, 0.8, 0.9]), is_faster([0.9, 0.8, 1.1]), is_faster([0.9])
        (True, False, False)
    """
    if len(ratios) < LEAST_PAIRS:
        return False
    interval = median_interval(ratios)
    return (max(ratios) if interval is None else interval[1]) < 1


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, whatever the distribution; None if too few.

    Of n values the number below the median is binomial (n, 1/2): the interval leaves out so many
    values at each end that the chance of missing the median there is at most 2.5 %.

    Example:
        >>> median_interval(range(1, 11)), median_interval(range(5))
        ((2, 9), None)
    """
    below, chance = 0, 1
    while chance <= 0.025 * 2 ** len(values):
        below += 1
        chance += comb(len(values), below)
    ordered = sorted(values)
    return (ordered[below - 1], ordered[-below]) if below else None


def is_clear(ratios: Sequence[float]) -> bool:
    """Whether more pairs would not change the decision."""
    if len(ratios) < LEAST_PAIRS:
        return False
    return max(ratios) < (1 + median(ratios)) / 2 or min(ratios) > 1


def in_words(ratios: Sequence[float]) -> str:
    """The number of pairs, their range and their median.

    Example:
        >>> in_words([0.9, 0.8, 1.1])
        '3 pairs in alternation, 0.800 to 1.100 of its time, median 0.900'
    """
    if not ratios:
        return "no pair"
    low, high = min(ratios), max(ratios)
    return (
        f"{len(ratios)} pairs in alternation, {low:.3f} to {high:.3f} of its time, "
        f"median {median(ratios):.3f}"
    )
