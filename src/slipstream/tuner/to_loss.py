"""Find the strategy under which a training reaches a loss first, with a few short runs of it.

How to run and how to predict come in as functions; this module starts no process and writes no
file.

[Note: How it calibrates]
1. The baseline runs from its start for some updates and is traced: its losses, its seconds.
2. It runs once more with norms of gradients, for the gradient noise scale. Its losses must be the
   same: runs that begin at other parameters, or see other batches, are no pairs.
3. What changes the mathematics and is predicted to be faster a batch runs on the same batches, the
   fastest first, once for each kind of mathematics, while the budget lasts. Larger batches come
   last, as the noise scale tells them, too. Under ``local`` the norms of what ranks change between
   meetings tell how far they agree.
4. The losses of these runs predict the time to the loss (``planner.progress``). What is not surely
   sooner there than the baseline is not chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from slipstream.errors import LaunchError, SlipstreamError, StrategyError, TraceError
from slipstream.planner.progress.calibration import (
    LossCalibration,
    LossRun,
    cosine_of_changes,
    losses_of,
    mathematics,
    noise_of_gradients,
)
from slipstream.planner.progress.curve import LEAST_UPDATES
from slipstream.planner.progress.time_to_loss import LossForecast, Timed, TimeToLoss, verdict
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import Strategy, at_once, late_by
from slipstream.trace.event import FULLY_SHARD
from slipstream.tuner.trial_log import Trial, TrialLog
from slipstream.tuner.trials import Failure, Measurement, iterations
from slipstream.tuner.tune import HANG_FACTOR, MODEL_ERROR, Predict, baseline_error

RUN_UPDATES = 150
"""Of a run, by default."""
SKIPPED = 3
"""Updates whose seconds do not count."""
EQUAL = 1e-3
"""Part of the loss by which two runs of the baseline may differ, by the order of sums."""
LEAST_ERROR = 0.01
RUN_RESERVE = 1.3
"""What a run may take longer than the last one."""

RunUpdates = Callable[[Strategy, float, int, bool], Measurement | Failure]
"""Runs so many updates from the first on within some seconds; True: with norms of gradients."""


class TunedToLoss(NamedTuple):
    """The strategy to use and why to reach a loss, with all predictions, the best first."""

    loss: float
    strategy: Strategy
    verdict: str
    predictions: tuple[TimeToLoss, ...]
    calibration: LossCalibration
    trials: tuple[Trial, ...]
    paired: bool


@dataclass
class LossTuner:
    """Calibrates one script; see the note at the top of the file.

    Args:
        run: runs the script under a strategy.
        base: the baseline, exact.
        loss: to reach.
        budget: seconds for everything.
        predict: strategies that change the mathematics, from a trace of the baseline.
        updates: of a run of the baseline, at least `LEAST_UPDATES`.
        hidden: why the script may not use the strategy that a trial gives it, if it looks so.
        notify: called with all trials after each new one.
        doing: called with what happens next, in words.
        clock: seconds; tests give a clock of their own.
    """

    run: RunUpdates
    base: Strategy
    loss: float
    budget: float
    predict: Predict
    updates: int = RUN_UPDATES
    hidden: str | None = None
    notify: Callable[[Sequence[Trial]], None] = lambda trials: None
    doing: Callable[[str], None] = lambda words: None
    clock: Callable[[], float] = time.monotonic
    _deadline: float = field(default=0.0, init=False)

    def tune(self) -> TunedToLoss:
        """Run, predict and choose within the budget.

        Raises:
            LaunchError: the baseline fails, or the budget has no room for another run.
            TraceError: its losses are not there, or tell no curve.
            StrategyError: the loss is reached already, or never; or the baseline's codec begins
                late, so that short runs are not what it is.
        """
        if late := late_by(self.base.gradients.codec):
            raise StrategyError(
                f"the codec of --strategy begins at update {late}, and the runs of --to-loss are "
                "shorter; give it start_step: 0, or leave --strategy out"
            )
        self._deadline = self.clock() + self.budget
        log = TrialLog(self.base, self.notify)
        first = self._first(log)
        said = first.trace.meta
        calibration = LossCalibration(
            runs=(_run_of(self.base, first),),
            ranks=said.get("world_size"),
            model=said.get("model"),
        )
        LossForecast(calibration).to_loss(self.loss, [Timed(self.base, first.seconds)])
        paired, noise, cosine = self._again(log, first)
        calibration = calibration.model_copy(update={"noise": noise, "cosine": cosine})
        self.doing("predicting")
        left_out = 0
        untried = ""
        try:
            predictions = self.predict(first.trace, self.base)
        except SlipstreamError as error:  # the losses that were measured are kept
            predictions, untried = [], f"; nothing else was tried: {error}"
        for one in self._promising(predictions):
            if self._left() < RUN_RESERVE * first.wall:
                log.note(one.strategy, one, None, "the budget ended before it")
                left_out += 1
                continue
            self.doing(label(one.strategy))
            times = one.strategy.gradients.accumulate / self.base.gradients.accumulate
            updates = max(int(self.updates / times), 1)
            limit = min(self._left(), HANG_FACTOR * first.wall)
            meets = one.strategy.local is not None
            outcome = self._run(one.strategy, limit, updates, norms=meets)
            if isinstance(outcome, Measurement):
                try:
                    runs = (*calibration.runs, _run_of(one.strategy, outcome))
                    calibration = calibration.model_copy(update={"runs": runs})
                except TraceError as error:  # a loss that is not finite, which a script may allow
                    outcome = Failure("failed", str(error))
            log.note(one.strategy, one, outcome, "on the batches of the baseline")
        forecast = LossForecast(calibration)
        found = forecast.to_loss(self.loss, self._timed(forecast, log))
        strategy, words = verdict(found, self.base)
        if left_out:
            words += f"; the budget ended before {left_out} more: a larger --budget tries them"
        words += untried
        trials = log.result(strategy, words).trials
        return TunedToLoss(self.loss, strategy, words, tuple(found), calibration, trials, paired)

    def _first(self, log: TrialLog) -> Measurement:
        self.doing(f"the baseline, {self.updates} updates")
        room = self._left()
        first = self._run(self.base, room, self.updates)
        log.note(self.base, None, first, "the baseline")
        if isinstance(first, Failure):
            error = baseline_error(first, self.budget, room, self.hidden)
            raise type(error)(f"{error} (a run of {self.updates} updates: --steps takes fewer)")
        if first.trace.meta.get("engine") == FULLY_SHARD:
            raise TraceError(
                "the script trains under torch's FSDP2 (fully_shard), whose traces hold no losses: "
                "--to-loss needs session.backward(loss); without it, tune --allow-lossy measures "
                "codecs there"
            )
        if self._left() < 2 * RUN_RESERVE * first.wall:
            raise LaunchError(
                f"the budget of {self.budget:.0f} s has no room behind the first run of "
                f"{first.wall:.0f} s for the two that follow at least; give --budget "
                f"{4 * first.wall + 1:.0f}s or more, or fewer --steps"
            )
        return first

    def _run(
        self, strategy: Strategy, limit: float, updates: int, norms: bool = False
    ) -> Measurement | Failure:
        """One run, with mean seconds: under ``local`` few updates exchange anything."""
        outcome = self.run(strategy, limit, updates, norms)
        if isinstance(outcome, Failure):
            return outcome
        return outcome._replace(seconds=fmean(_settled(outcome)))

    def _again(self, log: TrialLog, first: Measurement) -> tuple[bool, float | None, float | None]:
        """Whether a second run has the same losses, the noise scale and the cosine."""
        self.doing("the baseline again, with norms of gradients")
        limit = min(self._left(), HANG_FACTOR * first.wall)
        norms = not self.base.without_whole_averages
        again = self._run(self.base, limit, self.updates, norms)
        log.note(self.base, None, again, "the baseline again, with norms of gradients")
        if isinstance(again, Failure):
            return True, None, None
        pairs = list(zip(losses_of(first.trace), losses_of(again.trace), strict=False))
        early = pairs[: max(len(pairs) // 10, 1)]  # later rounding has grown
        paired = all(abs(a - b) <= EQUAL * max(abs(a), 1e-9) for a, b in early)
        noise, cosine = noise_of_gradients(again.trace) or (None, None)
        return paired, noise, cosine

    def _promising(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """One of each kind of mathematics, faster a batch than the baseline; larger batches last,
        as the noise scale tells them."""
        per_batch = {one.strategy: one.per_batch for one in predictions}
        mine = per_batch.get(self.base, float("inf"))
        best: dict[str, Prediction] = {}
        for one in sorted(predictions, key=lambda one: one.per_batch):
            gradients = one.strategy.gradients
            strategy = one.strategy.with_gradients(codec=at_once(gradients.codec))
            if one.per_batch <= mine * (1 + MODEL_ERROR):
                best.setdefault(mathematics(strategy), replace(one, strategy=strategy))
        best.pop(mathematics(self.base), None)
        larger = self.base.gradients.accumulate
        return sorted(
            best.values(), key=lambda o: (o.strategy.gradients.accumulate > larger, o.per_batch)
        )

    def _timed(self, forecast: LossForecast, log: TrialLog) -> list[Timed]:
        """List strategies that ran, and larger batches that did not, as they were predicted."""
        timed = forecast.timed()
        for trial in log.trials:
            strategy = Strategy.load(dict(trial.strategy))
            if trial.status == "not measured" and trial.predicted is not None:
                times = strategy.gradients.accumulate / self.base.gradients.accumulate
                timed.append(Timed(strategy, trial.predicted * times))
        return timed

    def _left(self) -> float:
        return max(0.0, self._deadline - self.clock())


def _run_of(strategy: Strategy, measured: Measurement) -> LossRun:
    """The losses of a run, its seconds and their error."""
    seconds, mean = _settled(measured), measured.seconds
    error = stdev(seconds) / sqrt(len(seconds)) / mean if len(seconds) > 1 else LEAST_ERROR
    return LossRun(
        strategy=strategy.document(),
        seconds=mean,
        error=max(error, LEAST_ERROR),
        losses=losses_of(measured.trace),
        cosine=cosine_of_changes(measured.trace),
    )


def _settled(measured: Measurement) -> list[float]:
    """Seconds of the updates that count."""
    seconds = iterations(measured.trace)
    return seconds[SKIPPED:] or seconds


def check_updates(updates: int) -> None:
    """Refuse runs that are too short for a curve.

    Raises:
        LaunchError: fewer than `LEAST_UPDATES`.
    """
    if updates < LEAST_UPDATES:
        raise LaunchError(
            f"--steps {updates}: too few updates for a curve of losses; allowed: {LEAST_UPDATES} "
            f"or more, by default {RUN_UPDATES}"
        )
