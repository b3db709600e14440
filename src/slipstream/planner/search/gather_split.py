"""Cuts of the parameters, in forward order, with which a forward that waits for them ends first.

The second phase of the ``sharded`` transport: each rank has updated its share of every parameter,
and all-gathers bring the shares together under the next forward, which waits for each layer. The
first phase is ``split``'s. Works on times, bytes and a cost alone.
Source of the two phases: Zhang et al., "DeAR", https://arxiv.org/abs/2302.12445
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from slipstream.planner.search.split import Cuts, Numbers, walk_back

_ROUNDING = 1e-9


def optimal_gather_cuts(
    forward: Numbers,
    num_bytes: Numbers,
    startup: float,
    per_byte: float,
    *,
    tolerance: float = 0.0,
) -> Cuts:
    """The cuts under which forward ends first; of equally good ones the fewest segments.

    All-gathers run one after the other from time 0 on, so the ``m``-th one, of layers up to ``j``,
    ends at ``A(m, j) = m * startup + per_byte * bytes of the first j``. The forward of the first
    ``j`` layers in ``m`` segments ends at
    ``E(m, j) = min over i < j of max(E(m-1, i), A(m, j)) + F(i, j)``, where ``F`` is the forward
    time of the layers from ``i`` to ``j``. An earlier end of a prefix never delays what follows, so
    ``min over m of E(m, n)`` is exact. Takes O(n^2) for each number of segments.

    Args:
        forward: Seconds of forward of each layer, in forward order.
        num_bytes: Bytes of each layer's parameters.
        startup: Seconds of an all-gather whatever its size.
        per_byte: Seconds for each byte.
        tolerance: Share by which forward may end later if that saves segments.

    Example:
        >>> optimal_gather_cuts([1.0, 1.0, 1.0], [1, 8, 1], startup=1.0, per_byte=0.5)
        (2, 3)
    """
    count = len(forward)
    if count == 0:
        return ()
    bytes_before = np.concatenate([[0.0], np.cumsum(np.asarray(num_bytes, dtype=np.float64))])
    done = np.concatenate([[0.0], np.cumsum(np.asarray(forward, dtype=np.float64))])
    times = np.where(np.tri(count + 1, dtype=bool), np.inf, done[None, :] - done[:, None])
    transfer = per_byte * bytes_before
    ends = np.concatenate([[0.0], np.full(count, np.inf)])
    parents: list[np.ndarray] = []  # of each round: where the last segment starts
    totals: list[float] = []  # of each round: when forward ends
    # One more startup delays the last all-gather, behind which some forward is always left.
    while len(parents) < count and not (
        totals and (len(totals) + 1) * startup + transfer[-1] >= min(totals) < np.inf
    ):
        gathered = (len(parents) + 1) * startup + transfer
        candidates = np.maximum(ends[:, None], gathered[None, :]) + times
        parents.append(candidates.argmin(axis=0))
        ends = candidates.min(axis=0)
        totals.append(float(ends[count]))
    bound = min(totals) * (1 + tolerance + _ROUNDING)
    number = next(m for m, end in enumerate(totals) if end <= bound)
    return walk_back(parents[1 : number + 1], count)


def forward_end(
    cuts: Sequence[int], forward: Numbers, num_bytes: Numbers, startup: float, per_byte: float
) -> float:
    """When forward ends if it waits for each segment, and these are gathered one after another.

    Example:
        >>> forward_end((2, 3), [1.0, 1.0, 1.0], [1, 8, 1], startup=1.0, per_byte=0.5)
        8.5
    """
    gathered = end = 0.0
    for start, stop in pairwise((0, *cuts)):
        gathered += startup + per_byte * float(np.sum(num_bytes[start:stop]))
        end = max(end, gathered) + float(np.sum(forward[start:stop]))
    return end
