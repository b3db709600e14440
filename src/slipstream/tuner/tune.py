"""Find the strategy under which a training script is fastest, with few runs of the script.

How to run and how to predict come in as functions; this module starts no process and writes no
file.

[Note: How it decides]
1. The baseline runs once and is traced.
2. One run tries all exact ways to exchange in turn, and keeps the fastest (``exact_search``). They
   were measured side by side, so the choice needs no other proof.
3. What cannot be swapped while a training runs gets runs of its own. Lossy strategies, if they are
   allowed, are predicted on the best exchange and measured, best prediction first, while the next
   one may still win: if it were MODEL_ERROR faster than predicted, it would beat the best
   measurement by more than the noise. At most a quarter of them is measured, and time for step 5 is
   kept back.
4. Settings of compute and data, which nothing predicts, are measured on the best so far, one after
   another; each stays if it makes that faster by more than the noise. The trace says which of
   them can change anything in this model.
5. What steps 3 and 4 found and the baseline run in alternation. It is chosen only if the median of
   the paired ratios is below 1 with a confidence of 95 % (with fewer than six pairs: if it was
   faster in every pair). Else the choice of step 2 stays, so tuning never ends with something
   slower.

A training under torch's ``fully_shard`` takes no other setting than a codec: there codecs, if lossy
strategies are allowed, are measured one after another, and steps 2 to 4 are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from statistics import median
from typing import Any, NamedTuple

from slipstream.errors import LaunchError, SlipstreamError, TraceError
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction, exactness
from slipstream.strategy import Strategy, late_by
from slipstream.strategy.codec import SCATTERED
from slipstream.trace import Trace
from slipstream.trace.event import FULLY_SHARD
from slipstream.tuner.exact_search import (
    RESERVE,
    UPDATES,
    chosen,
    open_strategy,
    reason,
    seconds_needed,
)
from slipstream.tuner.measured_choices import useful, with_settings
from slipstream.tuner.significance import LEAST_PAIRS, MOST_PAIRS, in_words, is_clear, is_faster
from slipstream.tuner.trial_log import Trial, TrialLog, Tuned
from slipstream.tuner.trials import Failure, Measurement

RunTrial = Callable[[Strategy, float], Measurement | Failure]
Predict = Callable[[Trace, Strategy], Sequence[Prediction]]
"""From a trace and the strategy to improve on to predictions of what else to measure."""

MODEL_ERROR = 0.05
LEAST_NOISE = 0.005
LEAST_MEASURED = 3
HANG_FACTOR = 3.0
ROOM = 3.0  # of the budget, for the first run
PATIENCE = 60.0  # seconds that the first run gets at least, if the budget allows
ENDED = {
    "failed": "failed",
    "hanging": "took too long",
    "no trace": f"ended before the {UPDATES} steps that try them and those of a trace behind them",
}
"""What became of a run, in words, by the status of its failure."""
KEPT_BACK = "the rest of the budget is for the comparison with the baseline"
LEAST_BUDGET = 30.0
"""Seconds; processes that import torch are started and ended in less, and do nothing yet."""


class _Measured(NamedTuple):
    """A strategy that ran, and its seconds; ``prediction`` None: nothing predicts it."""

    seconds: float
    strategy: Strategy
    prediction: Prediction | None = None


@dataclass
class Tuner:
    """Tunes one script; see the note at the top of the file.

    Args:
        run: measures the script under a strategy, within a number of seconds.
        base: the strategy to start from, and to keep unless another is faster.
        budget: seconds for everything.
        predict: lossy strategies, that of the best exchange among them; None: none are allowed.
        choices: settings of compute and data to try, where the trace says that they have a use.
        updates: of the whole training, if known: a codec that begins late counts for the rest.
        notify: called with all trials after each new one.
        doing: called with what happens next, in words.
        clock: seconds; tests give a clock of their own.
        hidden: why the script does not take the strategies of trials, if that is known.
    """

    run: RunTrial
    base: Strategy
    budget: float
    predict: Predict | None = None
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
            LaunchError: the baseline fails, or the budget is too small.
            TraceError: the baseline ends without a trace.
        """
        self._deadline = self.clock() + self.budget
        self._log = TrialLog(self.base, self.notify, self.updates)
        first = self._baseline()
        if first.trace.meta.get("engine") == FULLY_SHARD:
            return self._codecs_of_fully_shard(first)
        exact, verdict = self._search(first)
        predictions, untried = self._predict_lossy(exact, first)
        measured = self._measure_lossy(predictions, exact, first)
        measured = self._measure_choices(measured, exact, first)
        tuned = self._choose(measured, exact, verdict)
        return tuned._replace(verdict=tuned.verdict + untried)

    def _baseline(self) -> Measurement:
        """The first run. Everything else depends on it, so a failure ends the tuning."""
        self.doing("the baseline")
        room = self._left() / ROOM  # if it takes longer, nothing fits behind it
        first = self.run(self.base, min(self._left(), max(room, PATIENCE)))
        if isinstance(first, Failure):
            raise baseline_error(first, self.budget, room, self.hidden)
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

    def _search(self, first: Measurement) -> tuple[_Measured, str]:
        """The fastest exact exchange, and why; the baseline's where nothing is open."""
        baseline = _Measured(first.seconds, self.base)
        searching = open_strategy(self.base)
        if searching is None:
            self._log.note(self.base, None, first, "the baseline")
            return baseline, "no candidate was faster: the baseline stays"
        needed = seconds_needed(first)
        if needed > self._left():
            whole = ceil(self.budget - self._left() + needed)
            raise LaunchError(
                f"the budget of {self.budget:.0f} s is too small: the baseline run took "
                f"{first.wall:.1f} s, and the run that tries the exact choices in {UPDATES} steps "
                f"takes up to {needed:.0f} s; give --budget {whole}s or more"
            )
        self._log.note(self.base, None, first, "the baseline")
        self.doing(f"exact choices in one run: {UPDATES} steps, up to {needed:.0f} s")
        outcome = self.run(searching, min(self._left(), HANG_FACTOR * needed))
        if isinstance(outcome, Failure):
            self._log.note(searching, None, outcome, "the exact choices in turn")
            ended = ENDED[outcome.status]
            return baseline, f"the run that tried others {ended}: the baseline stays"
        best = chosen(outcome.trace, self.base)
        seconds = self._log.note(best, None, outcome, f"kept of the exact: {reason(outcome.trace)}")
        assert seconds is not None
        if best == self.base:
            return baseline, f"the baseline stays: {reason(outcome.trace)}"
        verdict = f"{label(best)} ({best.exactness}), chosen in one run: {reason(outcome.trace)}"
        return _Measured(seconds, best), verdict

    def _predict_lossy(
        self, exact: _Measured, first: Measurement
    ) -> tuple[Sequence[Prediction], str]:
        """Predictions for step 3, or none and why, in words: the exact choice stays without them,
        too."""
        if self.predict is None:
            return [], ""
        untried = "; lossy strategies were not tried: "
        if not self._has_room():
            return [], f"{untried}the budget ended before; give a larger --budget"
        self.doing("predicting")
        try:
            return self.predict(first.trace, exact.strategy), ""
        except SlipstreamError as error:
            return [], f"{untried}{error}"

    def _measure_lossy(
        self, predictions: Sequence[Prediction], exact: _Measured, first: Measurement
    ) -> list[_Measured]:
        """Measure the most promising lossy strategies; those that ran, fastest first."""
        if not predictions:
            return []
        of_exact = next(p for p in predictions if p.strategy == exact.strategy)
        # Predictions of the others are expected to be off by the same factor.
        scale = exact.seconds / (of_exact.per_batch * self.base.gradients.accumulate)
        noise, most = _noise(first), max(LEAST_MEASURED, ceil(len(predictions) / 4))
        best, stop = exact.seconds, ""
        measured: list[_Measured] = []
        tried = 0
        for prediction in predictions:
            strategy = prediction.strategy
            if strategy == exact.strategy:
                continue
            expected = prediction.per_batch * self.base.gradients.accumulate * scale
            stop = stop or self._reason_to_stop(expected, best, noise, tried >= most)
            if stop:
                self._log.note(strategy, prediction, None, stop)
                continue
            tried += 1
            why = f"predicted {_change(expected / first.seconds)}, {prediction.exactness}"
            seconds = self._try(strategy, why, prediction)
            if seconds is not None:
                best = min(best, seconds)
                measured.append(_Measured(seconds, strategy, prediction))
        return sorted(measured, key=lambda one: one.seconds)

    def _measure_choices(
        self, measured: list[_Measured], exact: _Measured, first: Measurement
    ) -> list[_Measured]:
        """Try settings of compute and data on the best so far; what made it faster comes first."""
        best = min([exact, *measured], key=lambda one: one.seconds)
        for settings in useful(self.choices, first.trace):
            strategy = with_settings(best.strategy, settings)
            if strategy is None:
                continue
            why = "on the best so far, as nothing predicts it"
            seconds = self._try(strategy, why, compiles=True)
            if seconds is not None and seconds < best.seconds * (1 - _noise(first)):
                best = _Measured(seconds, strategy)
                measured = [best, *measured]
        return measured

    def _try(
        self,
        strategy: Strategy,
        why: str,
        prediction: Prediction | None = None,
        *,
        compiles: bool = False,
    ) -> float | None:
        """Measure a candidate; None: it failed, or the budget has no room for it."""
        if not self._has_room():
            self._log.note(strategy, prediction, None, KEPT_BACK)
            return None
        self.doing(label(strategy))
        outcome = self._run(strategy, keep=self._comparison(), compiles=compiles)
        return self._log.note(strategy, prediction, outcome, why)

    def _codecs_of_fully_shard(self, first: Measurement) -> Tuned:
        """Choose between the baseline and what codecs bring, which nothing predicts here."""
        self._log.note(self.base, None, first, "the baseline")
        baseline = _Measured(first.seconds, self.base)
        only = "under fully_shard codecs are the only choice"
        if self.predict is None:
            lossy = f"{only}, and they are lossy: the baseline stays; --allow-lossy tries them"
            return self._choose([], baseline, lossy)
        measured: list[_Measured] = []
        for codec in SCATTERED:
            strategy = self.base.with_gradients(codec=codec())
            if strategy == self.base:
                continue
            seconds = self._try(strategy, only)
            if seconds is not None:
                measured.append(_Measured(seconds, strategy))
        measured.sort(key=lambda one: one.seconds)
        found = "no codec was faster" if measured else "no codec was measured (see the trials)"
        return self._choose(measured, baseline, f"{found}: the baseline stays")

    def _reason_to_stop(self, expected: float, best: float, noise: float, enough: bool) -> str:
        """Why this candidate and those after it are not measured; empty: measure it."""
        if expected * (1 - MODEL_ERROR) > best * (1 - noise):
            return (
                f"even {MODEL_ERROR:.0%} faster than predicted it would not beat the best so far "
                f"by more than the noise ({noise:.1%})"
            )
        if enough:
            return "enough others were predicted faster"
        if not self._has_room():
            return KEPT_BACK
        return ""

    def _choose(self, measured: Sequence[_Measured], exact: _Measured, verdict: str) -> Tuned:
        """The fastest that is proved faster than the baseline, or the best exact choice."""
        ratios: tuple[float, ...] | None = None
        stays = f"; {verdict}"
        for one in measured:
            ratios = self._compare(one) if one.seconds < exact.seconds else None
            if ratios is None:  # it is slower, or ran before but failed now: try the next one
                continue
            strategy, text = one.strategy, in_words(ratios)
            kind = exactness(strategy, self.base)
            if is_faster(ratios):
                gain = _change(median(ratios))
                verdict = f"{label(strategy)} ({kind}) is {gain} than the baseline: {text}"
                return self._log.result(strategy, verdict + self._unpriced(strategy), ratios)
            if len(ratios) < LEAST_PAIRS:
                verdict = f"the budget ended before {label(strategy)} was compared{stays}"
            else:
                verdict = f"{label(strategy)} is not faster beyond the noise: {text}{stays}"
            break
        return self._log.result(exact.strategy, verdict, ratios or ())

    def _unpriced(self, strategy: Strategy) -> str:
        """Count what a measurement of the codec at work leaves out."""
        late = late_by(strategy.gradients.codec)
        if not late or self.updates or late_by(self.base.gradients.codec):
            return ""
        return f"; that is from update {late} on: --updates N counts those before it, too"

    def _compare(self, one: _Measured) -> tuple[float, ...] | None:
        """The candidate's time over the baseline's, in alternation; None: the candidate failed.

        Ends early once more pairs would not change the decision, or the budget ends.
        """
        ratios: list[float] = []
        for pair in range(MOST_PAIRS):
            if self._left() < 2 * self._longest or is_clear(ratios):
                break
            seconds: dict[bool, float] = {}
            name = label(one.strategy)
            # Which one runs first alternates, so that a drift of the machine favours neither.
            for is_candidate in (False, True) if pair % 2 == 0 else (True, False):
                strategy = one.strategy if is_candidate else self.base
                self.doing(f"pair {pair + 1}: {name if is_candidate else 'the baseline'}")
                predicted = one.prediction if is_candidate else None
                why = f"pair {pair + 1} of {name} and the baseline"
                measured = self._log.note(strategy, predicted, self._run(strategy), why)
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

    def _has_room(self) -> bool:
        """Whether the budget has room for one more run and the comparison."""
        return self._left() >= self._longest * RESERVE + self._comparison()

    def _comparison(self) -> float:
        """Seconds that the comparison with the baseline may take."""
        return 2 * LEAST_PAIRS * self._longest * RESERVE


def baseline_error(
    failure: Failure, budget: float, room: float, hidden: str | None
) -> LaunchError | TraceError:
    """Make the error of a script whose first run failed.

    Args:
        failure: of the run.
        budget: seconds for everything.
        room: seconds of a run.
        hidden: why the script may not use the strategy that a trial gives it, if it looks so.
    """
    if hidden and failure.status != "failed":
        return TraceError(f"the baseline run: {failure.reason}; {hidden}")
    steps = (
        "the script must train by slipstream.accelerate() or an adapter, without a strategy of its "
        "own (the tuner gives one in SLIPSTREAM_STRATEGY), and make more than three updates"
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
    """Estimate how much two runs may differ that are equally fast, relative."""
    steps = {event.step for event in first.trace.events}
    return max(LEAST_NOISE, first.spread / first.seconds / sqrt(len(steps)))


def _change(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%} {'faster' if ratio < 1 else 'slower'}"
