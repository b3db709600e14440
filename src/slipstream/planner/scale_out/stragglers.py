"""Slowest of many ranks, whose times of an update are drawn from a distribution.

A rank takes ``exp(N(-s^2 / 2, s))`` times its usual time, which is 1 in the mean. Those that
exchange at every update wait for the slowest of each; those that meet every H updates for the
slowest mean of H, whose spread is ``s / sqrt(H)`` as far as it is drawn anew at every update.

Source: order statistics of the log-normal distribution; Hoefler, Schneider and Lumsdaine 2010 on
noise at scale.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from slipstream.planner.network.fit import Array
from slipstream.planner.scale_out.shape import Fabric

DRAWS = 100
"""Updates that a mean is taken over."""


def slowest(ranks: int, fabric: Fabric, updates: int = 1) -> float:
    """Compute the mean time of the slowest rank, in times of a rank's usual one.

    The same seed draws the same first ranks for any number of them: more ranks are never faster.

    Args:
        ranks: that wait for each other.
        fabric: how unequal ranks are, for good and from update to update, and the seed.
        updates: from one meeting to the next.

    Example:
        >>> fabric = Fabric(jitter=0.05)
        >>> round(slowest(1, fabric), 2), round(slowest(64, fabric), 2)
        (1.0, 1.13)
        >>> round(slowest(64, fabric, updates=16), 2)
        1.03
    """
    spread = math.hypot(fabric.unequal, fabric.jitter / math.sqrt(updates))
    if not spread:
        return 1.0
    return float(np.exp(spread * _largest(ranks, fabric.seed) - spread**2 / 2).mean())


@lru_cache(maxsize=64)
def _largest(ranks: int, seed: int) -> Array:
    """The largest of so many standard normal values, of each draw."""
    draws = (np.random.default_rng((seed, draw)) for draw in range(DRAWS))
    return np.array([draw.standard_normal(ranks).max() for draw in draws])
