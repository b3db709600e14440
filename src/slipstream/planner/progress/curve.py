"""Fits a curve of loss against updates, with what is not known about it.

[Note: A posterior on a grid]
The curve is ``loss(u) = floor + scale * (u + shift) ** -exponent``, the power law of neural
scaling with a floor (Hestness et al., "Deep learning scaling is predictable, empirically",
https://arxiv.org/abs/1712.00409). A short run tells its end well and its floor badly: many curves
fit as well, and they differ where nobody has looked. So no single one is kept. Every curve of a
grid of floors, exponents and shifts is weighed by how well it fits, each with its best scale, and
a prediction is the spread of what they say. Who calibrates has a training before them, so a floor
counts less the nearer it lies to the end of the short run. The loss of an update has noise, which
the differences between neighbours tell. No training follows a power law exactly, so a curve may
miss the mean of a bin by `MISFIT` of how far it lies above the end, and of what the loss has fallen
in the last half: the end must fit best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slipstream.planner.network.fit import Array

BINS = 16
FIRST = 0.1
"""Part of a run after which its losses count: before it, warm-up and the first drop."""
LATE = 0.5
"""Part of a run after which it is the end of it."""
MISFIT = 0.05
NOISE = 24
"""Updates that tell the noise of losses, at least: it falls with them."""
FLOORS = np.linspace(0.0, 0.98, 50)
"""Parts of the last loss."""
EXPONENTS = np.geomspace(0.05, 1.5, 42)
SHIFTS = np.array([-0.05, 0.0, 0.1, 0.2, 0.4, 0.8])
"""Parts of the length of the run; all updates that count are beyond the least."""
LEAST_UPDATES = 40
BEND = 0.25
"""Standard deviation of how much faster or slower the logarithm of updates runs beyond the
calibration: curves of real trainings bend where no short run can tell."""
DRAWS = 4000


class Bins(NamedTuple):
    """Means of losses over stretches of updates that grow with their number.

    Attributes:
        updates: the middle of each, as a geometric mean.
        losses: their means.
        errors: the standard error of each.
    """

    updates: Array
    losses: Array
    errors: Array


def binned(losses: Sequence[float] | Array, begin: float = FIRST, count: int = BINS) -> Bins:
    """Means over stretches of updates, the first update being 1.

    Args:
        losses: one an update.
        begin: part of the run that is left out.
        count: of stretches, at most.

    Example:
        >>> bins = binned(np.linspace(2.0, 1.0, 100))
        >>> len(bins.updates), round(float(bins.losses[-1]), 2)
        (16, 1.06)
    """
    values = np.asarray(losses, dtype=np.float64)
    first = int(begin * len(values))
    edges = np.unique(np.round(np.geomspace(first + 1, len(values) + 1, count + 1))).astype(int) - 1
    counts = np.diff(edges)
    means = np.add.reduceat(values, edges[:-1])
    noise = np.array(
        [
            noise_of(values[max(stop - max(stop - start, NOISE), 0) : stop])
            for start, stop in pairwise(edges)
        ]
    )
    middles = np.sqrt((edges[:-1] + 1) * np.maximum(edges[1:], edges[:-1] + 1))
    return Bins(middles, means / counts, noise / np.sqrt(counts))


def noise_of(losses: Array) -> float:
    """Standard deviation of single losses around their course, from second differences.

    Example:
        >>> noise_of(np.linspace(2.0, 1.0, 9))
        0.0
    """
    if len(losses) < 3:
        return 0.0
    second = losses[2:] - 2 * losses[1:-1] + losses[:-2]
    return float(np.round(np.sqrt(np.mean(second**2) / 6), 12))


@dataclass(frozen=True)
class LossCurve:
    """Curves that fit a run, drawn as often as they are likely; see the note at the top.

    Attributes:
        floors, scales, shifts, exponents: of each draw; the first is the likeliest.
        bends: how much slower the logarithm of updates runs beyond the run, of each draw, by
            `BEND`; 1 of the likeliest.
        updates: of the run.
    """

    floors: Array
    scales: Array
    shifts: Array
    exponents: Array
    bends: Array
    updates: int

    @classmethod
    def fit(cls, losses: Sequence[float] | Array, seed: int = 0) -> LossCurve:
        """Fit the losses of a run, the first update's first.

        Args:
            losses: one an update, at least `LEAST_UPDATES`, which fall in the end.
            seed: of the draws.

        Raises:
            ValueError: too few losses, or they do not fall, or below 0.

        Example:
            >>> curve = LossCurve.fit(1 + 4 * np.arange(1, 201) ** -0.3)
            >>> low, middle, high = np.quantile(curve.losses(800), [0.1, 0.5, 0.9])
            >>> bool(low < 1 + 4 * 800**-0.3 < high)
            True
        """
        if len(losses) < LEAST_UPDATES:
            raise ValueError(
                f"{len(losses)} updates tell no curve; run it for {LEAST_UPDATES} at least"
            )
        bins = binned(losses)
        fallen = float(bins.losses[0] - bins.losses[-1])
        if fallen <= 0:
            raise ValueError(f"the loss does not fall in {len(losses)} updates; run it for longer")
        if bins.losses[-1] <= 0:
            raise ValueError(
                f"its loss falls to {bins.losses[-1]:.4g}, and a curve is known of losses above 0 "
                "alone; give backward() a loss that has a constant added"
            )
        late = bins.losses[bins.updates >= LATE * len(losses)]
        above_end = np.maximum(bins.losses - bins.losses[-1], 0) + abs(late[0] - late[-1])
        weights = 1 / (bins.errors**2 + (MISFIT * above_end) ** 2 + 1e-18)
        floors, exponents, shifts = (
            axis.ravel()[:, None]
            for axis in np.meshgrid(
                FLOORS * bins.losses[-1], EXPONENTS, SHIFTS * len(losses), indexing="ij"
            )
        )
        powers = (bins.updates + shifts) ** -exponents
        above = bins.losses - floors
        scales = (weights * powers * above).sum(1) / (weights * powers**2).sum(1)
        misses = (weights * (above - scales[:, None] * powers) ** 2).sum(1)
        likely = np.where(scales > 0, np.exp(-(misses - misses.min()) / 2), 0.0)
        likely *= (1 - floors[:, 0] / bins.losses[-1]) ** 2
        random = np.random.default_rng(seed)
        chosen = random.choice(len(likely), DRAWS, p=likely / likely.sum())
        chosen[0] = likely.argmax()
        bends = np.exp(BEND * random.standard_normal(DRAWS))
        bends[0] = 1.0
        return cls(
            floors[chosen, 0],
            scales[chosen],
            shifts[chosen, 0],
            exponents[chosen, 0],
            bends,
            len(losses),
        )

    @property
    def likeliest(self) -> LossCurve:
        """The first draw alone."""
        return LossCurve(
            self.floors[:1],
            self.scales[:1],
            self.shifts[:1],
            self.exponents[:1],
            self.bends[:1],
            self.updates,
        )

    def losses(self, updates: float | Array) -> Array:
        """The loss after so many updates, of each draw."""
        beyond = np.maximum(np.asarray(updates) / self.updates, 1.0)
        bent = updates * beyond ** (1 / self.bends - 1)
        bent = np.maximum(bent + self.shifts, 1.0)
        return np.asarray(self.floors + self.scales * bent**-self.exponents)

    def updates_to(self, loss: float | Array) -> Array:
        """Updates after which the loss is reached, of each draw; infinite where it never is."""
        above = np.asarray(loss - self.floors)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            reached = (above / self.scales) ** (-1 / self.exponents) - self.shifts
            reached *= np.maximum(reached / self.updates, 1.0) ** (self.bends - 1)
        return np.where(above > 0, np.maximum(reached, 1.0), np.inf)
