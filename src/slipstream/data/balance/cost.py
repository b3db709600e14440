"""The cost of a sample by its length: a line for the layers, a parabola for attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UsageError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthCost:
    """``linear * length + quadratic * length ** 2``, in any unit: seconds, or relative.

    Example:
        >>> LengthCost(linear=1.0, quadratic=0.5)([1, 2]).tolist()
        [1.5, 4.0]
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if min(self.linear, self.quadratic) < 0 or self.linear == self.quadratic == 0:
            raise UsageError(
                f"linear is {self.linear}, quadratic {self.quadratic}; allowed: 0 or more each, "
                "and more than 0 for one of them"
            )

    def __call__(self, lengths: npt.ArrayLike) -> Floats:
        """The cost of each length."""
        found = np.asarray(lengths, dtype=np.float64)
        costs: Floats = found * (self.linear + self.quadratic * found)
        return costs


def fit_cost(lengths: Sequence[Sequence[int]], seconds: Sequence[float]) -> LengthCost:
    """The cost that explains measured batches best, by least squares over both coefficients.

    A coefficient that would be negative is 0. Time that does not depend on the lengths (the update,
    the loop) is fitted, too, and left out: it is the same on every rank.

    Args:
        lengths: of the samples of each batch, as they were computed; padded ones count in full.
        seconds: that forward and backward of each batch took.

    Raises:
        UsageError: fewer than three batches, or all of them are alike.

    Example:
        >>> cost = fit_cost([[1, 1], [4], [2, 3], [6]], [2.1, 4.1, 5.1, 6.1])
        >>> round(cost.linear, 6), round(cost.quadratic, 6)
        (1.0, 0.0)
    """
    sums = np.array([[1.0, sum(row), sum(n * n for n in row)] for row in lengths])
    times = np.asarray(seconds, dtype=np.float64)
    if len(sums) != len(times) or len(sums) < 3 or len({tuple(row[1:]) for row in sums}) < 2:
        raise UsageError(
            f"{len(sums)} batches and {len(times)} times; allowed: as many times as batches, three "
            "or more, of different lengths"
        )
    best: tuple[float, LengthCost] | None = None
    for used in ([1, 2], [1], [2]):
        columns = sums[:, [0, *used]]
        scale = columns.max(axis=0)
        found, *_ = np.linalg.lstsq(columns / scale, times, rcond=None)
        error = float(np.square(columns / scale @ found - times).sum())
        coefficients: dict[int, Any] = dict(zip(used, (found / scale)[1:].tolist(), strict=True))
        if min(coefficients.values()) <= 0:
            continue
        if best is None or error < best[0]:
            best = error, LengthCost(coefficients.get(1, 0.0), coefficients.get(2, 0.0))
    if best is None:
        raise UsageError("longer samples took no more time in these batches; measure more of them")
    return best[1]
