"""Predicts when a training reaches a loss under each strategy, and which one to take.

Time to a loss = updates to the loss x seconds an update. The first comes from the calibration's
short runs, the second is measured or predicted by the caller. Intervals hold 80 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Literal, NamedTuple

import numpy as np

from slipstream.errors import StrategyError, TraceError
from slipstream.planner.network.fit import Array
from slipstream.planner.progress.calibration import LossCalibration, LossRun, mathematics
from slipstream.planner.progress.curve import DRAWS, LEAST_UPDATES, LossCurve
from slipstream.planner.progress.delay import Delay, LargerBatch
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import DEVIATIONS, Prediction
from slipstream.strategy import Strategy

UpdatesFrom = Literal["exact", "measured", "noise scale"]
"""Origin of a number of updates: that of data parallelism by definition, a paired run, or bounds
from the gradient noise scale."""

INTERVAL = (0.1, 0.5, 0.9)
FORECAST_ERROR = 0.05
"""Relative standard error of seconds that were predicted and not measured: docs/planner.md."""
FAR = 10.0
"""Times the updates of the calibration beyond which a prediction says so."""


class Quantiles(NamedTuple):
    """Bounds that hold 80 %, and the median between them; infinite where it never comes."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> Quantiles:
        """Quantiles of draws, of which some may be infinite.

        Example:
            >>> Quantiles.of(np.array([1.0, 2.0, 3.0, np.inf]))
            Quantiles(low=1.0, middle=2.0, high=inf)
        """
        low, middle, high = np.quantile(draws, INTERVAL, method="inverted_cdf")
        return cls(float(low), float(middle), float(high))


class Timed(NamedTuple):
    """A strategy and the seconds of an update under it, with two relative standard errors.

    Attributes:
        strategy: under which.
        seconds: of an update.
        error: of this strategy alone.
        common: of all strategies together, which their ratios do not have.
    """

    strategy: Strategy
    seconds: float
    error: float = FORECAST_ERROR
    common: float = 0.0

    @classmethod
    def of(cls, one: Prediction, baseline: Prediction) -> Timed:
        """Take the errors from the intervals of predictions."""
        own = _error(one.ratio_interval) if one.strategy != baseline.strategy else 0.0
        return cls(one.strategy, one.seconds, own, _error(baseline.interval))


@dataclass(frozen=True, slots=True)
class TimeToLoss:
    """A prediction for one strategy.

    Attributes:
        strategy: that it is for.
        source: of the number of updates.
        seconds: of an update.
        updates: to the loss.
        time: seconds to the loss.
        ratio: its time over that of the baseline, the noise of the common curve cancelled.
        better: probability that it is faster than the baseline.
    """

    strategy: Strategy
    source: UpdatesFrom
    seconds: float
    updates: Quantiles
    time: Quantiles
    ratio: Quantiles
    better: float

    @property
    def is_clear(self) -> bool:
        """Whether it is faster than the baseline for all that its interval holds."""
        return self.ratio.high < 1

    @property
    def in_words(self) -> str:
        """Its time against the baseline's."""
        low, middle, high = self.ratio
        return f"takes {middle:.2f} of the baseline's time ({low:.2f} to {high:.2f})"


@dataclass(frozen=True, slots=True)
class LossAfter:
    """The loss that one strategy reaches by a time; ``better`` is the probability that it is below
    the baseline's, ``gap`` their difference."""

    strategy: Strategy
    source: UpdatesFrom
    seconds: float
    loss: Quantiles
    gap: Quantiles
    better: float

    @property
    def is_clear(self) -> bool:
        """Whether it is below the baseline's for all that its interval holds."""
        return self.gap.high < 0

    @property
    def in_words(self) -> str:
        """Its loss against the baseline's."""
        low, middle, high = self.gap
        return f"ends {middle:+.3g} from the baseline's loss ({low:+.3g} to {high:+.3g})"


@dataclass(frozen=True)
class LossForecast:
    """Predicts losses and times from a calibration.

    Args:
        calibration: runs from one start on the same batches.

    Example:
        >>> dense = [2 + 3 / update**0.5 for update in range(1, 201)]
        >>> slow = [2 + 3 / (update / 2) ** 0.5 for update in range(1, 201)]
        >>> settings = {}, {"gradients": {"codec": "int8"}}
        >>> runs = [
        ...     LossRun(strategy=of, seconds=1.0, error=0.01, losses=losses)
        ...     for of, losses in zip(settings, (dense, slow), strict=True)
        ... ]
        >>> forecast = LossForecast(LossCalibration(runs=runs))
        >>> ddp, int8 = forecast.to_loss(2.1, [Timed(Strategy.load(s), 1.0) for s in settings])
        >>> ddp.strategy == Strategy(), int8.better < 0.1, int8.ratio.low < 2 < int8.ratio.high
        (True, True, True)
        >>> verdict([ddp, int8])[1]
        'stay with the baseline: nothing else is predicted to reach it sooner'
    """

    calibration: LossCalibration

    @property
    def base(self) -> Strategy:
        """The strategy of the first run."""
        return Strategy.load(self.calibration.runs[0].strategy)

    @cached_property
    def curve(self) -> LossCurve:
        """The curve of the first run.

        Raises:
            TraceError: its losses tell no curve.
        """
        try:
            return LossCurve.fit(self.calibration.runs[0].losses)
        except ValueError as error:
            raise TraceError(f"the calibration's first run: {error}") from None

    @cached_property
    def runs(self) -> dict[str, LossRun]:
        """The runs of the calibration, by what decides their losses."""
        return {mathematics(Strategy.load(run.strategy)): run for run in self.calibration.runs}

    def timed(self) -> list[Timed]:
        """The strategies of the calibration, as fast as they were there."""
        return [
            Timed(Strategy.load(run.strategy), run.seconds, run.error)
            for run in self.calibration.runs
        ]

    def source(self, strategy: Strategy) -> UpdatesFrom | None:
        """Tell what the updates of a strategy are known from; None: they are not."""
        key, base = mathematics(strategy), self.base
        if key == mathematics(base):
            return "exact"
        if (run := self.runs.get(key)) is not None and len(run.losses) >= LEAST_UPDATES / 2:
            return "measured"
        as_base = strategy.with_gradients(accumulate=base.gradients.accumulate)
        if self.calibration.noise is not None and mathematics(as_base) == mathematics(base):
            return "noise scale" if self._batches(strategy) > 1 else None
        return None

    def delay(self, strategy: Strategy) -> Delay | LargerBatch | None:
        """Updates of a strategy against those of the first run; None: nothing tells them."""
        key, times = mathematics(strategy), self._batches(strategy)
        match self.source(strategy):
            case None:
                return None
            case "exact":
                return Delay.none()
            case "measured":
                dense, run = self.calibration.runs[0].losses, self.runs[key]
                batches = max(round(times), 1)
                delay = Delay.fit(self.curve, dense, run.losses, batches, _seed(key))
            case "noise scale":
                noise = self.calibration.noise
                assert noise is not None
                delay = Delay.between((1 + noise / times) / (1 + noise), 1.0, _seed(key))
        return delay if times <= 1 else LargerBatch.of(delay, self.curve, times, _seed(key))

    def _batches(self, strategy: Strategy) -> float:
        return strategy.gradients.accumulate / self.base.gradients.accumulate

    # Times and losses.

    def to_loss(self, loss: float, timed: Sequence[Timed]) -> list[TimeToLoss]:
        """Predict the time to a loss, the shortest first; strategies of which nothing tells the
        updates are left out.

        Args:
            loss: to reach, the mean over ranks of what ``session.backward()`` gets.
            timed: strategies; the first is the baseline.

        Raises:
            StrategyError: the calibration has reached the loss, or its curve never does.
        """
        self._check(loss)
        dense = self.curve.updates_to(loss)
        if np.isinf(np.median(dense)):
            floor = float(np.median(self.curve.floors))
            raise StrategyError(
                f"--to-loss {loss:g}: the losses of the calibration level off at {floor:.4g} or "
                f"so; allowed: more than that, and less than {self._end:.4g}"
            )
        found: list[TimeToLoss] = []
        own = _seconds(timed[0])
        for one in timed:
            delay, source = self.delay(one.strategy), self.source(one.strategy)
            if delay is None or source is None:
                continue
            updates, seconds = delay.updates_for(dense), _seconds(one)
            time = updates * seconds
            with np.errstate(invalid="ignore"):  # what is never reached: the ratio far out
                of_updates = np.where(np.isinf(dense), delay.far_ratios, updates / dense)
            ratio = of_updates * seconds / own
            found.append(
                TimeToLoss(
                    one.strategy,
                    source,
                    one.seconds,
                    Quantiles.of(updates),
                    Quantiles.of(time),
                    Quantiles.of(ratio),
                    float(np.mean(ratio < 1)),
                )
            )
        return sorted(found, key=lambda one: one.ratio.middle)

    def after(self, seconds: float, timed: Sequence[Timed]) -> list[LossAfter]:
        """Predict the loss after a time, the lowest first; arguments and order as `to_loss`."""
        found: list[LossAfter] = []
        baseline: Array | None = None
        for one in timed:
            source = self.source(one.strategy)
            if source is None:
                continue
            losses = self.course(one, np.array([seconds]))[:, 0]
            baseline = losses if baseline is None else baseline
            gap = losses - baseline
            found.append(
                LossAfter(
                    one.strategy,
                    source,
                    one.seconds,
                    Quantiles.of(losses),
                    Quantiles.of(gap),
                    float(np.mean(gap < 0)),
                )
            )
        return sorted(found, key=lambda one: one.gap.middle)

    def course(self, timed: Timed, seconds: Array) -> Array:
        """Losses at these times: a row a draw, a column a time."""
        delay = self.delay(timed.strategy)
        assert delay is not None, "source() tells of which strategies the updates are known"
        updates = seconds / _seconds(timed)[:, None]
        worth = np.stack([delay.dense_for(column) for column in np.maximum(updates, 1.0).T])
        return np.stack([self.curve.losses(row) for row in worth]).T

    def reach(self, updates: float) -> float:
        """Times the updates of the first run that so many are."""
        return updates / self.curve.updates

    @property
    def _end(self) -> float:
        return float(np.median(self.curve.losses(self.curve.updates)))

    def _check(self, loss: float) -> None:
        if loss >= self._end:
            raise StrategyError(
                f"--to-loss {loss:g}: the calibration's first run has reached it in its "
                f"{self.curve.updates} updates; allowed: less than {self._end:.4g}"
            )


def verdict(
    found: Sequence[TimeToLoss | LossAfter], base: Strategy | None = None
) -> tuple[Strategy, str]:
    """Choose: the first whose interval is clear of the baseline's, else the baseline.

    Args:
        found: of `LossForecast`, in its order.
        base: the baseline; None: the default strategy.

    Returns:
        The strategy, and a sentence.
    """
    base = base or Strategy()
    first = found[0]
    clear = next((one for one in found if one.strategy != base and one.is_clear), None)
    if clear is not None:
        words = (
            f"{label(clear.strategy)} {clear.in_words}; {clear.better:.0%} sure that it is better"
        )
        return clear.strategy, words
    if first.strategy == base:
        sooner = "reach it sooner" if isinstance(first, TimeToLoss) else "have a lower loss then"
        return base, f"stay with the baseline: nothing else is predicted to {sooner}"
    words = f"{label(first.strategy)} {first.in_words}, so only {first.better:.0%} sure that it is"
    return base, f"stay with the baseline: {words} better"


def _seconds(timed: Timed) -> Array:
    """Seconds of an update, of each draw."""
    random = np.random.default_rng(_seed(timed.strategy.to_json()) + 1)
    shared = np.random.default_rng(2**31).standard_normal(DRAWS)  # no seed of another draw
    errors = timed.error * random.standard_normal(DRAWS) + timed.common * shared
    return np.asarray(timed.seconds * np.exp(errors))


def _error(interval: tuple[float, float]) -> float:
    """Relative standard error of what an interval holds with 80 %."""
    return log(interval[1] / interval[0]) / (2 * DEVIATIONS)


def _seed(text: str) -> int:
    """A seed of its own for each strategy, the same in each run."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text)) % 2**31
