"""Find the strategy under which a training script is fastest, with few runs of the script.

How to run and how to predict come in as functions; this module starts no process and writes no
file.

[Note: How it decides]
1. The baseline runs once and is traced. Every candidate is predicted from that trace.
2. Candidates are measured, best prediction first, while the next one may still win: if it were
   MODEL_ERROR faster than predicted, it would beat the best measurement by more than the noise. At
   most a quarter of them is measured, and time for step 3 is kept back.
3. The fastest candidate and the baseline run in alternation. The candidate is chosen only if the
   median of the paired ratios is below 1 with a confidence of 95 % (with fewer than six pairs: if
   it was faster in every pair). Else the baseline stays, so tuning never ends with something
   slower.
Where the budget has no room for so many starts of the script, one start tries several exact choices
instead (``one_start``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from statistics import median
from typing import Any, Literal, NamedTuple

from slipstream.errors import LaunchError, TraceError
from slipstream.planner.candidates import label
from slipstream.planner.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.trace import Trace
from slipstream.tuner.one_start import CALIBRATION, UPDATES, chosen, open_strategy, reason
from slipstream.tuner.significance import LEAST_PAIRS, MOST_PAIRS, in_words, is_clear, is_faster
from slipstream.tuner.trials import Failure, Measurement

MODEL_ERROR = 0.05
LEAST_NOISE = 0.005
LEAST_MEASURED = 3
HANG_FACTOR = 3.0
ROOM = 3.0  # of the budget, for the first run
PATIENCE = 60.0  # seconds that the first run gets at least, if the budget allows
RUNS = 1 + 2 * LEAST_PAIRS  # the least: one candidate, and its comparison with the baseline
RESERVE = 1.2  # later runs may take a little longer than the first one

Run = Callable[[Strategy, float], Measurement | Failure]
Predict = Callable[[Trace], Sequence[Prediction]]
Status = Literal["measured", "failed", "hanging", "no trace", "not measured"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One strategy that was run, or was not, and why.

    ``predicted``, ``measured`` and ``spread`` are seconds for as many batches as one iteration of
    the baseline takes, so that strategies that accumulate differently compare.
    """

    name: str
    strategy: Mapping[str, Any]
    predicted: float | None
    measured: float | None
    spread: float | None
    reason: str
    status: Status


class Tuned(NamedTuple):
    """The strategy to use and the proof: ``ratios`` are its time over the baseline's, by pair."""

    strategy: Strategy
    improved: bool
    verdict: str
    ratios: tuple[float, ...]
    trials: tuple[Trial, ...]


@dataclass
class Tuner:
    """Tunes one script; see the note at the top of the file.

    Args:
        run: measures the script under a strategy, within a number of seconds.
        predict: from the baseline's trace to predictions, fastest first, the baseline's among them.
        base: the strategy to start from, and to keep unless another is faster.
        budget: seconds for everything.
        notify: called with all trials after each new one.
        doing: called with what happens next, in words.
        clock: seconds; tests give a clock of their own.
    """

    run: Run
    predict: Predict
    base: Strategy
    budget: float
    notify: Callable[[Sequence[Trial]], None] = lambda trials: None
    doing: Callable[[str], None] = lambda words: None
    clock: Callable[[], float] = time.monotonic
    _trials: list[Trial] = field(default_factory=list, init=False)
    _deadline: float = field(default=0.0, init=False)
    _longest: float = field(default=0.0, init=False)  # seconds of the longest run so far

    def tune(self) -> Tuned:
        """Find the fastest strategy within the budget.

        Raises:
            LaunchError: the baseline fails, or the budget is too small for one trial.
            TraceError: the baseline ends without a trace.
        """
        self._deadline = self.clock() + self.budget
        first = self._baseline()
        searching = open_strategy(self.base)
        if self._needed > self._left() and searching is not None:
            return self._in_one_start(searching, first)
        self._check_budget()
        self.doing("predicting")
        predictions = self.predict(first.trace)
        self._check_budget()  # again: predicting may measure the network
        baseline = next(p for p in predictions if p.strategy == self.base)
        self._note(self.base, baseline, first, "the baseline")
        others = [p for p in predictions if p is not baseline]
        measured = self._measure_promising(others, first, first.seconds / baseline.seconds)
        return self._choose(measured, first)

    def _baseline(self) -> Measurement:
        """The first run. Everything else depends on it, so a failure ends the tuning."""
        self.doing("the baseline")
        room = self._left() / ROOM  # if it takes longer, nothing fits behind it
        first = self.run(self.base, min(self._left(), max(room, PATIENCE)))
        if isinstance(first, Failure):
            raise _baseline_error(first, self.budget, room)
        self._longest = first.wall
        return first

    def _run(self, strategy: Strategy, keep: float = 0.0) -> Measurement | Failure:
        """One run, which must leave ``keep`` seconds of the budget.

        A run counts as hanging if it takes HANG_FACTOR times as long as the longest one so far.
        """
        batches = max(strategy.gradients.accumulate / self.base.gradients.accumulate, 1.0)
        limit = HANG_FACTOR * batches * self._longest
        outcome = self.run(strategy, min(self._left() - keep, limit))
        if isinstance(outcome, Measurement):
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

    def _in_one_start(self, searching: Strategy, first: Measurement) -> Tuned:
        """Let one run try the exact choices in turn.

        Raises:
            LaunchError: the budget has no room for that either.
        """
        steps = len({event.step for event in first.trace.events})
        start = max(first.wall - steps * first.seconds, 0.0)
        needed = RESERVE * (start + (UPDATES + steps) * first.seconds) + CALIBRATION
        if needed > self._left():
            spent = self.budget - self._left()
            raise LaunchError(
                f"the budget of {self.budget:.0f} s is too small for one trial: the baseline run "
                f"took {first.wall:.1f} s, {start:.1f} s of it before the first step; {RUNS} more "
                f"runs take {self._needed:.0f} s, and one start that tries the exact choices in "
                f"{UPDATES} steps takes {needed:.0f} s; give --budget "
                f"{ceil(spent + min(needed, self._needed))}s or more"
            )
        self._note(self.base, None, first, f"the baseline; {start:.1f} s before the first step")
        self.doing(f"exact choices in one start: {UPDATES} steps, about {needed:.0f} s")
        outcome = self.run(searching, self._left())
        why = f"one start instead of {RUNS} runs of {first.wall:.1f} s"
        if isinstance(outcome, Failure):
            self._note(searching, None, outcome, why)
            verdict = f"the start that tried others {outcome.status}: the baseline stays"
            return Tuned(self.base, False, verdict, (), tuple(self._trials))
        best = chosen(outcome.trace, self.base)
        self._note(best, None, outcome, f"{why}: {reason(outcome.trace)}")
        verdict = f"{label(best)} ({best.exactness}), chosen in {why}: {reason(outcome.trace)}"
        return Tuned(best, best != self.base, verdict, (), tuple(self._trials))

    def _measure_promising(
        self, predictions: Sequence[Prediction], first: Measurement, scale: float
    ) -> list[tuple[float, Prediction]]:
        """Measure the most promising; returns the seconds of those that ran, fastest first.

        ``scale`` is the baseline's measured over its predicted time: predictions of the others are
        expected to be off by the same factor.
        """
        steps = {event.step for event in first.trace.events}
        noise = max(LEAST_NOISE, first.spread / first.seconds / sqrt(len(steps)))
        most = max(LEAST_MEASURED, ceil(len(predictions) / 4))
        best, stop, tried = first.seconds, "", 0
        measured: list[tuple[float, Prediction]] = []
        for prediction in predictions:
            expected = prediction.per_batch * self.base.gradients.accumulate * scale
            if not stop:
                stop = self._reason_to_stop(expected, best, noise, tried >= most)
            if stop:
                self._note(prediction.strategy, prediction, None, stop)
                continue
            tried += 1
            self.doing(label(prediction.strategy))
            outcome = self._run(prediction.strategy, keep=self._comparison())
            reason = f"predicted {_change(expected / first.seconds)}, {prediction.exactness}"
            seconds = self._note(prediction.strategy, prediction, outcome, reason)
            if seconds is not None:
                best = min(best, seconds)
                measured.append((seconds, prediction))
        return sorted(measured, key=lambda pair: pair[0])

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
            return "the rest of the budget is for the comparison with the baseline"
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
            elif len(ratios) < LEAST_PAIRS:
                verdict = f"the budget ended before {name} was compared: the baseline stays"
            else:
                verdict = f"{name} is not faster beyond the noise: {text}; the baseline stays"
            break
        return Tuned(chosen, chosen != self.base, verdict, ratios or (), tuple(self._trials))

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
                measured = self._note(strategy, predicted, self._run(strategy), reason)
                if measured is not None:
                    seconds[is_candidate] = measured
                elif is_candidate:
                    return None
            if len(seconds) == 2:
                ratios.append(seconds[True] / seconds[False])
        return tuple(ratios)

    def _note(
        self,
        strategy: Strategy,
        prediction: Prediction | None,
        outcome: Measurement | Failure | None,
        reason: str,
    ) -> float | None:
        """Log one run (``outcome`` None: there was none).

        Returns:
            Its measured seconds, as in `Trial`; None without a measurement.
        """
        # Iterations of this strategy that take as many batches as one of the baseline.
        scale = self.base.gradients.accumulate / strategy.gradients.accumulate
        predicted = prediction.seconds * scale if prediction else None
        status: Status = "not measured"
        measured = spread = None
        if isinstance(outcome, Measurement):
            measured, spread, status = outcome.seconds * scale, outcome.spread * scale, "measured"
        elif outcome:
            reason, status = f"{reason}; {outcome.reason}", outcome.status
        name, settings = label(strategy), strategy.document()
        self._trials.append(Trial(name, settings, predicted, measured, spread, reason, status))
        self.notify(self._trials)
        return measured

    def _left(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._deadline - self.clock())

    def _comparison(self) -> float:
        """Seconds that the comparison with the baseline may take."""
        return 2 * LEAST_PAIRS * self._longest * RESERVE


def _baseline_error(failure: Failure, budget: float, room: float) -> LaunchError | TraceError:
    """The error of a script whose first run failed."""
    steps = (
        "the script must call slipstream.accelerate() without a strategy of its own (the tuner "
        "gives one in SLIPSTREAM_STRATEGY), and session.step() more than three times"
    )
    if failure.status == "no trace":
        return TraceError(f"the script never steps: {failure.reason}; {steps}")
    if failure.status == "hanging":
        return LaunchError(
            f"the baseline run took too long: {failure.reason}; a budget of {budget:.0f} s has "
            f"room for runs of {room:.0f} s. Either give more (--budget), or the script never "
            f"steps: {steps}"
        )
    return LaunchError(f"the baseline run failed, {failure.reason}; fix the script first")


def _change(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%} {'faster' if ratio < 1 else 'slower'}"
