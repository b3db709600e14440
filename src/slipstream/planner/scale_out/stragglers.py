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

from slipstream.planner.scale_out.shape import FabricConfig

_Z = np.linspace(-9.0, 11.0, 4001)
_ABOVE = np.array([0.5 * math.erfc(z / math.sqrt(2)) for z in _Z.tolist()])
"""The probability that a standard normal value is above each z."""


def slowest(ranks: int, fabric: FabricConfig, updates: int = 1) -> float:
    """Compute the expected time of the slowest rank, in times of a rank's usual one.

    Exact for one update; for the mean of several the log-normal distribution is kept.

    Args:
        ranks: that wait for each other.
        fabric: how unequal ranks are, for good and from update to update.
        updates: from one meeting to the next.

    Example:
        >>> fabric = FabricConfig(jitter=0.05)
        >>> round(slowest(1, fabric), 2), round(slowest(64, fabric), 2)
        (1.0, 1.12)
        >>> round(slowest(64, fabric, updates=16), 2)
        1.03
    """
    spread = math.hypot(fabric.unequal, fabric.jitter / math.sqrt(updates))
    return _expected(ranks, spread) if spread else 1.0


@lru_cache(maxsize=256)
def _expected(ranks: int, spread: float) -> float:
    all_below = np.exp(ranks * np.log1p(-np.minimum(_ABOVE, 1 - 1e-16)))
    times = np.exp(spread * _Z - spread**2 / 2)
    return float(np.sum((times[1:] + times[:-1]) / 2 * np.diff(all_below)))
