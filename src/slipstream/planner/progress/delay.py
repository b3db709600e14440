"""Compares a lossy run with data parallelism's: how many more updates it needs for a loss.

[Note: Paired runs]
Both runs begin at the same parameters and see the same batches, so that what a batch is hard by
is in both losses: it is taken off, and what is left tells small differences. A stretch of the
lossy run around its update ``u`` has the loss that data parallelism had after ``v`` updates, and
``u = lag + ratio * v``: a lag is paid once (error feedback that fills, outer momentum that begins,
a schedule's first updates), a ratio for as long as it trains. A short run tells their sum well, and
apart badly. So ratios count less the further they are from 1 (`RATIO_ERROR`); under larger batches
any ratio counts that noise allows: from one over the batches of an update, where all of it is
noise, to 1, where nothing is.

[Note: Larger batches later on]
Gradients grow noisier while the loss falls, so a larger batch brings more later than in a
calibration. With a gradient noise scale of ``n`` batches, an update of ``k`` batches is worth
``(1 + n) / (1 + n / k)`` (McCandlish et al. 2018), and ``n`` grows as ``loss ** -(1 / 0.21)``, of
language models as they were measured (Kaplan et al., "Scaling laws for neural language models",
https://arxiv.org/abs/2001.08361, equation 1.4). Draws of the power reach from 0 to twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.planner.network.fit import Array
from slipstream.planner.progress.curve import DRAWS, LossCurve, binned

RATIO_ERROR = 0.1
"""Scale of the logarithm of the ratio before anything was measured: of a Cauchy distribution, as
most methods keep up with data parallelism and some do not at all."""
LAGS = np.linspace(-0.1, 1.5, 161)
"""Parts of the run."""
RATIOS = np.linspace(-0.4, 3.0, 171)
"""Logarithms."""
BEGIN, BINS = 0.4, 6
"""Part of the run after which its losses count, as a lag takes a while to build up; and stretches
of the rest."""
MISFIT = 0.1
"""Part by which ``v`` may miss, where the course is another."""
NOISE_POWER = 1 / 0.21
"""How fast noise grows: see the note."""
POINTS, SEARCH = 48, 8
"""Updates at which a ratio that changes is looked at; and steps of the search for one."""


@dataclass(frozen=True)
class Delay:
    """Updates against those that data parallelism needs, drawn as often as they are likely.

    Attributes:
        lags: updates that are paid once.
        ratios: updates for one of data parallelism.
    """

    lags: Array
    ratios: Array

    @classmethod
    def none(cls) -> Delay:
        """Make the delay of an exact strategy: none, by definition.

        Example:
            >>> float(Delay.none().updates_for(np.array(300.0)).max())
            300.0
        """
        return cls(np.zeros(DRAWS), np.ones(DRAWS))

    @classmethod
    def between(cls, low: float, high: float, seed: int = 0) -> Delay:
        """One without a lag whose ratio has two bounds; any between them is as likely.

        Args:
            low, high: updates for one of data parallelism.
            seed: of the draws.
        """
        random = np.random.default_rng(seed)
        return cls(np.zeros(DRAWS), np.exp(random.uniform(np.log(low), np.log(high), DRAWS)))

    @classmethod
    def fit(
        cls,
        curve: LossCurve,
        dense: Sequence[float],
        lossy: Sequence[float],
        batches: int = 1,
        seed: int = 0,
    ) -> Delay:
        """Fit a lossy run on the batches of data parallelism's.

        Args:
            curve: of the dense run.
            dense: losses of data parallelism.
            lossy: losses of the other run, on the same batches.
            batches: those of data parallelism that an update of the lossy run takes.
            seed: of the draws.

        Example:
            >>> dense = 1 + 4 * np.arange(1, 201) ** -0.5
            >>> later = 1 + 4 * np.maximum(np.arange(1, 201) - 50.0, 1.0) ** -0.5
            >>> delay = Delay.fit(LossCurve.fit(dense), dense, later)
            >>> bool(abs(np.median(delay.updates_for(np.full(4000, 1000.0))) - 1050) < 30)
            True
        """
        count = min(len(lossy), len(dense) // batches)
        best = curve.likeliest
        hard = np.asarray(dense) - best.losses(np.arange(1.0, len(dense) + 1))
        hard = hard[: count * batches].reshape(count, batches).mean(1)
        bins = binned(np.asarray(lossy)[:count] - hard, BEGIN, BINS)
        # a loss that data parallelism has not reached in the calibration is at its end or beyond
        reached = np.minimum(best.updates_to(bins.losses), 4.0 * len(dense))
        since = np.maximum(reached + best.shifts, 1e-9)
        slopes = best.scales * best.exponents * since ** (-best.exponents - 1)
        errors = bins.errors / np.maximum(slopes, 1e-12)
        weights = 1 / (errors**2 + (MISFIT * reached + 0.5) ** 2)
        center = RATIOS if batches == 1 else np.linspace(-np.log(batches), 0.2, len(RATIOS))
        lags, ratios = (
            axis.ravel()[:, None] for axis in np.meshgrid(LAGS * count, center, indexing="ij")
        )
        # below 0 within a lag: else one as long as the run would explain a run that never learns
        found = (bins.updates - lags) / np.exp(ratios)
        misses = (weights * (reached - found) ** 2).sum(1)
        if batches == 1:
            misses += 2 * np.log1p((ratios[:, 0] / RATIO_ERROR) ** 2)
        likely = np.exp(-(misses - misses.min()) / 2)
        chosen = np.random.default_rng(seed).choice(len(likely), DRAWS, p=likely / likely.sum())
        return cls(lags[chosen, 0], np.exp(ratios[chosen, 0]))

    @property
    def far_ratios(self) -> Array:
        """Updates for one of data parallelism, however far out."""
        return self.ratios

    def updates_for(self, dense: Array) -> Array:
        """Updates that it needs where data parallelism needs ``dense``, of each draw."""
        return np.maximum(self.lags + self.ratios * dense, 1.0)

    def dense_for(self, updates: float | Array) -> Array:
        """Updates of data parallelism that its own are worth, of each draw."""
        return np.asarray(np.maximum((updates - self.lags) / self.ratios, 1.0))


@dataclass(frozen=True)
class LargerBatch:
    """A delay whose ratio falls behind the calibration, as gradients grow noisier; see the note.

    Attributes:
        delay: in the calibration.
        curve: of data parallelism.
        batches: those of data parallelism that an update takes.
        powers: how fast the noise grows, of each draw.
    """

    delay: Delay
    curve: LossCurve
    batches: float
    powers: Array

    @classmethod
    def of(cls, delay: Delay, curve: LossCurve, batches: float, seed: int = 0) -> LargerBatch:
        """Draw the powers.

        Args:
            delay: in the calibration.
            curve: of data parallelism.
            batches: those of data parallelism that an update takes.
            seed: of the draws.

        Example:
            >>> curve = LossCurve.fit(1 + 4 * np.arange(1, 201) ** -0.5)
            >>> one = LargerBatch.of(Delay.between(0.6, 0.6), curve, 4)
            >>> soon, late = (np.median(one.updates_for(np.full(4000, v))) / v for v in (200, 2000))
            >>> round(float(soon), 2), bool(0.25 < late < 0.5)
            (0.6, True)
        """
        powers = np.random.default_rng(seed + 1).uniform(0, 2 * NOISE_POWER, DRAWS)
        return cls(delay, curve, batches, powers)

    @property
    def far_ratios(self) -> Array:
        """Updates for one of data parallelism, however far out: at the curve's floor."""
        at = np.stack([self.curve.losses(self.curve.updates), self.curve.floors])
        return np.asarray(self._ratios(at)[1])

    def updates_for(self, dense: Array) -> Array:
        """Updates that it needs where data parallelism needs ``dense``, of each draw."""
        end = float(self.curve.updates)
        within = self.delay.updates_for(np.minimum(dense, end))
        far = np.where(np.isfinite(dense), np.maximum(dense, end), end)
        steps = np.linspace(0.0, 1.0, POINTS)[:, None] * np.log(far / end)
        at = end * np.exp(steps)
        ratios = self._ratios(np.stack([self.curve.losses(row) for row in at]))
        beyond = ((ratios[1:] + ratios[:-1]) / 2 * np.diff(at, axis=0)).sum(axis=0)
        return np.asarray(np.where(np.isfinite(dense), within + beyond, np.inf))

    def dense_for(self, updates: float | Array) -> Array:
        """Updates of data parallelism that its own are worth, of each draw."""
        low = np.zeros(DRAWS)  # in logarithms, where it is nearly a line
        high = np.log(np.maximum(self.delay.dense_for(updates) * self.batches, 1.0))
        short, over = (np.log(self.updates_for(np.exp(end)) / updates) for end in (low, high))
        before = np.zeros(DRAWS)
        for _ in range(SEARCH):  # regula falsi, after Illinois
            width = np.where(over > short, over - short, 1.0)
            middle = low + (high - low) * np.clip(-short / width, 0.0, 1.0)
            found = np.log(self.updates_for(np.exp(middle)) / updates)
            less, again = found < 0, np.where(found * before > 0, 0.5, 1.0)
            short, over = np.where(less, found, short * again), np.where(less, over * again, found)
            before = found
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        return np.exp(middle)

    def _ratios(self, losses: Array) -> Array:
        """Updates for one of data parallelism at these losses: a row a loss, a column a draw."""
        least, first = 1 / self.batches, self.delay.ratios
        noise = (1 - first) / np.maximum(first - least, 1e-9)
        fallen = np.maximum(losses / losses[:1], 1e-9) ** self.powers
        grown = (fallen + noise / self.batches) / (fallen + noise)
        return np.asarray(np.where((least < first) & (first < 1), grown, first))
