"""Every way to cut a number of gradients or layers, for brute force."""

from __future__ import annotations

from functools import cache
from itertools import chain, combinations


@cache
def all_cuts(count: int) -> tuple[tuple[int, ...], ...]:
    """Every way to cut ``count`` gradients."""
    inner = range(1, count)
    chosen = chain.from_iterable(combinations(inner, size) for size in range(count))
    return tuple((*cuts, count) for cuts in chosen)
