"""Find the strategy under which a training script is fastest, with few runs of the script.

How to run and how to predict come in as functions; this module starts no process and writes no
file.

[Note: How it decides]
1. The baseline runs once and is traced. Every candidate is predicted from that trace.
2. Candidates are measured, best prediction first, while the next one may still win: if it were
   MODEL_ERROR faster than predicted, it would beat the best measurement by more than the noise. At
   most a quarter of them is measured, and time for step 4 is kept back.
3. Settings of compute and data, which nothing predicts, are measured on the best so far, one after
   another; each stays if it makes that faster by more than the noise. The trace says which of
   them can change anything in this model.
4. The fastest candidate and the baseline run in alternation. The candidate is chosen only if the
   median of the paired ratios is below 1 with a confidence of 95 % (with fewer than six pairs: if
   it was faster in every pair). Else the baseline stays, so tuning never ends with something
   slower.
Where the budget has no room for so many starts of the script, one start tries several exact choices
instead (``one_start``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from statistics import median
from typing import Any

from slipstream.errors import LaunchError, TraceError
from slipstream.planner.candidates import label
from slipstream.planner.ranking import Prediction, handicap
from slipstream.strategy import Strategy, late_by
from slipstream.tuner.measured_choices import useful, with_settings
from slipstream.tuner.one_start import RESERVE, OneStart, Predict, RunTrial, open_strategy
from slipstream.tuner.significance import LEAST_PAIRS, MOST_PAIRS, in_words, is_clear, is_faster
from slipstream.tuner.trial_log import Trial, TrialLog, Tuned
from slipstream.tuner.trials import Failure, Measurement

MODEL_ERROR = 0.05
LEAST_NOISE = 0.005
LEAST_MEASURED = 3
HANG_FACTOR = 3.0
ROOM = 3.0  # of the budget, for the first run
PATIENCE = 60.0  # seconds that the first run gets at least, if the budget allows
KEPT_BACK = "the rest of the budget is for the comparison with the baseline"
RUNS = 1 + 2 * LEAST_PAIRS  # the least: one candidate, and its comparison with the baseline


@dataclass
class Tuner:
    """Tunes one script; see the note at the top of the file.

    Args:
        run: measures the script under a strategy, within a number of seconds.
        predict: from the baseline's trace to predictions, fastest first, the baseline's among them.
        base: the strategy to start from, and to keep unless another is faster.
        budget: seconds for everything.
        choices: settings of compute and data to try, where the trace says that they have a use.
        updates: of the whole training, if known: a codec that begins late counts for the rest.
        notify: called with all trials after each new one.
        doing: called with what happens next, in words.
        clock: seconds; tests give a clock of their own.
        hidden: why the script does not take the strategies of trials, if that is known.
    """

    run: RunTrial
    predict: Predict
    base: Strategy
    budget: float
    choices: Sequence[Mapping[str, Any]] = ()
    updates: int | None = None
    notify: Callable[[Sequence[Trial]], None] = lambda trials: None
    doing: Callable[[str], None] = lambda words: None
    clock: Callable[[], float] = time.monotonic
    hidden: str | None = None
    _log: TrialLog = field(init=False)
    _deadline: float = field(default=0.0, init=False)
    _longest: float = field(default=0.0, init=False)  # seconds of the longest run so far

    def tune(self) -> Tuned:
        """Find the fastest strategy within the budget.

        Raises:
            LaunchError: the baseline fails, or the budget is too small for one trial.
            TraceError: the baseline ends without a trace.
        """
        self._deadline = self.clock() + self.budget
        self._log = TrialLog(self.base, self.notify, self.updates)
        first = self._baseline()
        searching = open_strategy(self.base)
        if self._needed > self._left() and searching is not None:
            one = OneStart(self.run, self.predict, self._log, self._left, self.doing)
            return one.tune(searching, first, self.budget, RUNS)
        self._check_budget()
        self.doing("predicting")
        predictions = self.predict(first.trace)
        self._check_budget()  # again: predicting may measure the network
        baseline = next(p for p in predictions if p.strategy == self.base)
        self._log.note(self.base, baseline, first, "the baseline")
        others = [p for p in predictions if p is not baseline]
        measured = self._measure_promising(others, first, first.seconds / baseline.seconds)
        measured = self._measure_choices(measured, first, baseline)
        return self._choose(measured, first)

    def _baseline(self) -> Measurement:
        """The first run. Everything else depends on it, so a failure ends the tuning."""
        self.doing("the baseline")
        room = self._left() / ROOM  # if it takes longer, nothing fits behind it
        first = self.run(self.base, min(self._left(), max(room, PATIENCE)))
        if isinstance(first, Failure):
            raise _baseline_error(first, self.budget, room, self.hidden)
        self._longest = first.wall
        return first

    def _run(
        self, strategy: Strategy, keep: float = 0.0, *, compiles: bool = False
    ) -> Measurement | Failure:
        """One run, which must leave ``keep`` seconds of the budget.

        A run counts as hanging if it takes HANG_FACTOR times as long as the longest one so far;
        not if it ``compiles``, which later runs need not.
        """
        batches = max(strategy.gradients.accumulate / self.base.gradients.accumulate, 1.0)
        limit = float("inf") if compiles else HANG_FACTOR * batches * self._longest
        outcome = self.run(strategy, min(self._left() - keep, limit))
        if isinstance(outcome, Measurement) and not compiles:
            self._longest = max(self._longest, outcome.wall)
        return outcome

    @property
    def _needed(self) -> float:
        """Seconds of a candidate and its comparison with the baseline."""
        return RUNS * self._longest * RESERVE

    def _check_budget(self) -> None:
        """Check that a candidate and its comparison with the baseline still fit the budget."""
        if self._needed > self._left():
            whole = ceil(self.budget - self._left() + self._needed)
            raise LaunchError(
                f"the budget of {self.budget:.0f} s is too small for one trial: the baseline run "
                f"took {self._longest:.1f} s, and a candidate and its comparison with the baseline "
                f"take {RUNS} more; give --budget {whole}s or more"
            )

    def _measure_promising(
        self, predictions: Sequence[Prediction], first: Measurement, scale: float
    ) -> list[tuple[float, Prediction]]:
        """Measure the most promising; returns the seconds of those that ran, fastest first.

        ``scale`` is the baseline's measured over its predicted time: predictions of the others are
        expected to be off by the same factor.
        """
        noise = _noise(first)
        most = max(LEAST_MEASURED, ceil(len(predictions) / 4))
        best, stop, tried = first.seconds, "", 0
        measured: list[tuple[float, Prediction]] = []
        for prediction in predictions:
            expected = prediction.per_batch * self.base.gradients.accumulate * scale
            if not stop:
                stop = self._reason_to_stop(expected, best, noise, tried >= most)
            if stop:
                self._log.note(prediction.strategy, prediction, None, stop)
                continue
            tried += 1
            self.doing(label(prediction.strategy))
            outcome = self._run(prediction.strategy, keep=self._comparison())
            reason = f"predicted {_change(expected / first.seconds)}, {prediction.exactness}"
            seconds = self._log.note(prediction.strategy, prediction, outcome, reason)
            if seconds is not None:
                best = min(best, seconds)
                measured.append((seconds, prediction))
        return sorted(measured, key=lambda pair: pair[0] * handicap(pair[1].strategy, self.base))

    def _measure_choices(
        self,
        measured: list[tuple[float, Prediction]],
        first: Measurement,
        baseline: Prediction,
    ) -> list[tuple[float, Prediction]]:
        """Try settings of compute and data on the best so far; what made it faster comes first."""
        best, prediction = first.seconds, baseline
        if measured and measured[0][0] < best:
            best, prediction = measured[0]
        for settings in useful(self.choices, first.trace):
            strategy = with_settings(prediction.strategy, settings)
            if strategy is None:
                continue
            if self._left() < self._longest * RESERVE + self._comparison():
                self._log.note(strategy, None, None, KEPT_BACK)
                continue
            self.doing(label(strategy))
            outcome = self._run(strategy, keep=self._comparison(), compiles=True)
            reason = "on the best so far, as nothing predicts it"
            seconds = self._log.note(strategy, None, outcome, reason)
            if seconds is not None and seconds < best * (1 - _noise(first)):
                exactness = strategy.exactness
                best, prediction = (
                    seconds,
                    replace(prediction, strategy=strategy, exactness=exactness),
                )
                measured = [(best, prediction), *measured]
        return measured

    def _reason_to_stop(self, expected: float, best: float, noise: float, enough: bool) -> str:
        """Why this candidate and those after it are not measured; empty: measure it."""
        if expected * (1 - MODEL_ERROR) > best * (1 - noise):
            return (
                f"even {MODEL_ERROR:.0%} faster than predicted it would not beat the best so far "
                f"by more than the noise ({noise:.1%})"
            )
        if enough:
            return "enough others were predicted faster"
        if self._left() < self._longest * RESERVE + self._comparison():
            return KEPT_BACK
        return ""

    def _choose(self, measured: Sequence[tuple[float, Prediction]], first: Measurement) -> Tuned:
        """The fastest that is proved faster than the baseline, or the baseline."""
        chosen, verdict = self.base, "no candidate was faster: the baseline stays"
        ratios: tuple[float, ...] | None = None
        for seconds, prediction in measured:
            ratios = self._compare(prediction) if seconds < first.seconds else None
            if ratios is None:  # it is slower, or ran before but failed now: try the next one
                continue
            name, text = label(prediction.strategy), in_words(ratios)
            if is_faster(ratios):
                gain, chosen = _change(median(ratios)), prediction.strategy
                verdict = f"{name} ({prediction.exactness}) is {gain} than the baseline: {text}"
                verdict += self._unpriced(prediction.strategy)
            elif len(ratios) < LEAST_PAIRS:
                verdict = f"the budget ended before {name} was compared: the baseline stays"
            else:
                verdict = f"{name} is not faster beyond the noise: {text}; the baseline stays"
            break
        return self._log.result(chosen, verdict, ratios or ())

    def _unpriced(self, strategy: Strategy) -> str:
        """What a measurement of the codec at work leaves out."""
        late = late_by(strategy.gradients.codec)
        if not late or self.updates:
            return ""
        return f"; that is from update {late} on: --updates N counts those before it, too"

    def _compare(self, prediction: Prediction) -> tuple[float, ...] | None:
        """The candidate's time over the baseline's, in alternation; None: the candidate failed.

        Ends early once more pairs would not change the decision, or the budget ends.
        """
        ratios: list[float] = []
        for pair in range(MOST_PAIRS):
            if self._left() < 2 * self._longest or is_clear(ratios):
                break
            seconds: dict[bool, float] = {}
            name = label(prediction.strategy)
            # Which one runs first alternates, so that a drift of the machine favours neither.
            for is_candidate in (False, True) if pair % 2 == 0 else (True, False):
                strategy = prediction.strategy if is_candidate else self.base
                self.doing(f"pair {pair + 1}: {name if is_candidate else 'the baseline'}")
                predicted = prediction if is_candidate else None
                reason = f"pair {pair + 1} of {name} and the baseline"
                measured = self._log.note(strategy, predicted, self._run(strategy), reason)
                if measured is not None:
                    seconds[is_candidate] = measured
                elif is_candidate:
                    return None
            if len(seconds) == 2:
                ratios.append(seconds[True] / seconds[False])
        return tuple(ratios)

    def _left(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._deadline - self.clock())

    def _comparison(self) -> float:
        """Seconds that the comparison with the baseline may take."""
        return 2 * LEAST_PAIRS * self._longest * RESERVE


def _baseline_error(
    failure: Failure, budget: float, room: float, hidden: str | None
) -> LaunchError | TraceError:
    """The error of a script whose first run failed."""
    if hidden and failure.status != "failed":
        return TraceError(f"the baseline run: {failure.reason}; {hidden}")
    steps = (
        "the script must call slipstream.accelerate() without a strategy of its own (the tuner "
        "gives one in SLIPSTREAM_STRATEGY), and session.step() more than three times"
    )
    if failure.status == "no trace":
        return TraceError(f"the baseline run: {failure.reason}; {steps}")
    if failure.status == "hanging":
        return LaunchError(
            f"the baseline run took too long: {failure.reason}; a budget of {budget:.0f} s has "
            f"room for runs of {room:.0f} s. Either give more (--budget), or it wrote no trace: "
            f"{steps}"
        )
    return LaunchError(f"the baseline run failed, {failure.reason}; fix the script first")


def _noise(first: Measurement) -> float:
    """How much two runs may differ that are equally fast, relative."""
    steps = {event.step for event in first.trace.events}
    return max(LEAST_NOISE, first.spread / first.seconds / sqrt(len(steps)))


def _change(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%} {'faster' if ratio < 1 else 'slower'}"
