"""Finds the strategy under which a training script is fastest, by few measurements of the script.

Never starts a process and never writes a file: how to run and how to predict come in as functions,
and every run is told to ``notify`` as soon as it is over.

[Note: How it decides]
1. One traced run of the baseline. Every candidate is predicted from that trace.
2. Candidates are measured, best prediction first, while one may still win: even MODEL_ERROR faster
   than predicted it must beat the best measurement by more than the noise. At most a quarter of
   them is measured, and time for step 3 is kept back.
3. The fastest is compared with the baseline in alternation. It is chosen only if the median of the
   ratios in pairs is below 1 with a confidence of 95 % (of fewer than six pairs: if it was faster
   in every one). Else the baseline stays, so that tuning never ends with something slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from statistics import median

from slipstream.errors import LaunchError, TraceError
from slipstream.planner.candidates import label
from slipstream.planner.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.trace import Trace
from slipstream.tuner.significance import LEAST_PAIRS, MOST_PAIRS, in_words, is_clear, is_faster
from slipstream.tuner.trial_log import Trial, TrialLog
from slipstream.tuner.trials import Failure, Measurement

MODEL_ERROR = 0.05
LEAST_NOISE = 0.005
LEAST_MEASURED = 3
HANG_FACTOR = 3.0
PATIENCE = 60.0  # seconds that the first run gets at least, if the budget holds them
RUNS = 1 + 2 * LEAST_PAIRS  # a candidate, and its comparison with the baseline
RESERVE = 1.2  # runs of the comparison may take a little longer than the first one did

Run = Callable[[Strategy, float], Measurement | Failure]
Predict = Callable[[Trace], Sequence[Prediction]]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The strategy to use, and the proof: ``ratios`` are its time over the baseline's, in pairs."""

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
        predict: from the baseline's trace to predictions, the most promising first, that of the
            baseline among them.
        base: the strategy to start from, and to stay with unless another is faster.
        budget: seconds for everything.
        notify: gets the log after every run.
        doing: gets what is being done now, in words.
        clock: seconds; another than ``time.monotonic`` serves tests.
    """

    run: Run
    predict: Predict
    base: Strategy
    budget: float
    notify: Callable[[Sequence[Trial]], None] = lambda trials: None
    doing: Callable[[str], None] = lambda words: None
    clock: Callable[[], float] = time.monotonic
    _log: TrialLog = field(init=False)
    _deadline: float = field(default=0.0, init=False)
    _wall: float = field(default=0.0, init=False)  # seconds of the longest run

    def tune(self) -> Tuned:
        """Find the fastest strategy within the budget.

        Raises:
            LaunchError: the baseline fails, or the budget is too small for one trial.
            TraceError: the baseline ends without a trace.
        """
        self._deadline = self.clock() + self.budget
        self._log = TrialLog(self.base, self.notify)
        first = self._baseline()
        self._check_budget()
        self.doing("predicting")
        predictions = self.predict(first.trace)
        self._check_budget()  # predicting may have meant to measure the network
        own = next(p for p in predictions if p.strategy == self.base)
        self._log.add(self.base, own, first, "the baseline")
        others = [p for p in predictions if p is not own]
        measured = self._measure_promising(others, first, first.seconds / own.seconds)
        return self._choose(measured, first)

    def _baseline(self) -> Measurement:
        """The first run; on it everything else is founded, so whatever is wrong with it is said."""
        self.doing("the baseline")
        room = self._left() / (1 + RUNS * RESERVE)  # a run that takes longer is one too long
        first = self.run(self.base, min(self._left(), max(room, PATIENCE)))
        if isinstance(first, Failure):
            raise _baseline_error(first, self.budget, room)
        self._wall = first.wall
        return first

    def _run(self, strategy: Strategy, keep: float = 0.0) -> Measurement | Failure:
        """One run; ``keep`` seconds of the budget are for what follows it.

        It hangs if it takes several times as long as the longest one that did not.
        """
        batches = max(strategy.gradients.accumulate / self.base.gradients.accumulate, 1.0)
        outcome = self.run(strategy, min(self._left() - keep, HANG_FACTOR * batches * self._wall))
        if isinstance(outcome, Measurement):
            self._wall = max(self._wall, outcome.wall)
        return outcome

    def _check_budget(self) -> None:
        """It must hold a candidate and its comparison with the baseline."""
        needed = RUNS * self._wall * RESERVE
        if needed > self._left():
            whole = ceil(self.budget - self._left() + needed)
            raise LaunchError(
                f"the budget of {self.budget:.0f} s is too small for one trial: the baseline run "
                f"took {self._wall:.1f} s, and a candidate and its comparison with the baseline "
                f"take {RUNS} more; give --budget {whole}s or more"
            )

    def _measure_promising(
        self, predictions: Sequence[Prediction], first: Measurement, scale: float
    ) -> list[tuple[float, Prediction]]:
        """Measure the most promising; returns those that ran, fastest first.

        ``scale`` is what the baseline took over what it was predicted to take: all others are
        expected to be off by as much.
        """
        noise = max(LEAST_NOISE, first.spread / first.seconds / sqrt(len(_steps(first))))
        most = max(LEAST_MEASURED, ceil(len(predictions) / 4))
        best, stop, tried = first.seconds, "", 0
        measured: list[tuple[float, Prediction]] = []
        for prediction in predictions:
            expected = self._log.predicted(prediction) * scale
            if not stop:
                stop = self._reason_to_stop(expected, best, noise, tried >= most)
            if stop:
                self._log.add(prediction.strategy, prediction, None, stop)
                continue
            tried += 1
            self.doing(label(prediction.strategy))
            outcome = self._run(prediction.strategy, keep=self._comparison())
            gain = 1 - expected / first.seconds
            reason = f"predicted {_change(gain)}, {prediction.exactness}"
            self._log.add(prediction.strategy, prediction, outcome, reason)
            if isinstance(outcome, Measurement):
                seconds = self._log.seconds(prediction.strategy, outcome)
                best = min(best, seconds)
                measured.append((seconds, prediction))
        return sorted(measured, key=lambda found: found[0])

    def _reason_to_stop(self, expected: float, best: float, noise: float, enough: bool) -> str:
        """Why neither this candidate nor those after it are measured; empty: go on."""
        if expected * (1 - MODEL_ERROR) > best * (1 - noise):
            return (
                f"even {MODEL_ERROR:.0%} faster than predicted it would not beat the best so far "
                f"by more than the noise ({noise:.1%})"
            )
        if enough:
            return "enough others were predicted faster"
        if self._left() < self._wall * RESERVE + self._comparison():
            return "the rest of the budget is for the comparison with the baseline"
        return ""

    def _choose(self, measured: Sequence[tuple[float, Prediction]], first: Measurement) -> Tuned:
        """The fastest that proves itself against the baseline, or the baseline."""
        for seconds, prediction in measured:
            if seconds >= first.seconds:
                break
            ratios = self._compare(prediction)
            if ratios is None:  # it failed now: the next one
                continue
            name, text = label(prediction.strategy), in_words(ratios)
            if len(ratios) < LEAST_PAIRS:
                verdict = f"the budget ended before {name} was compared: the baseline stays"
            elif is_faster(ratios):
                gain = _change(1 - median(ratios))
                verdict = f"{name} ({prediction.exactness}) is {gain} than the baseline: {text}"
                return self._end(prediction.strategy, verdict, ratios, improved=True)
            else:
                verdict = f"{name} is not faster beyond the noise: {text}; the baseline stays"
            return self._end(self.base, verdict, ratios, improved=False)
        return self._end(
            self.base, "no candidate was faster: the baseline stays", (), improved=False
        )

    def _compare(self, prediction: Prediction) -> tuple[float, ...] | None:
        """The candidate's time over the baseline's, run in alternation; None: the candidate failed.

        It ends early once even the worst pair shows half the gain of the median.
        """
        ratios: list[float] = []
        for pair in range(MOST_PAIRS):
            if self._left() < 2 * self._wall or is_clear(ratios):
                break
            seconds: dict[bool, float] = {}
            for ours in (False, True) if pair % 2 == 0 else (True, False):
                strategy = prediction.strategy if ours else self.base
                self.doing(f"pair {pair + 1}: {label(strategy) if ours else 'the baseline'}")
                outcome = self._run(strategy)
                reason = f"pair {pair + 1} of {label(prediction.strategy)} and the baseline"
                self._log.add(strategy, prediction if ours else None, outcome, reason)
                if isinstance(outcome, Measurement):
                    seconds[ours] = self._log.seconds(strategy, outcome)
                elif ours:
                    return None
            if len(seconds) == 2:
                ratios.append(seconds[True] / seconds[False])
        return tuple(ratios)

    def _end(
        self, strategy: Strategy, verdict: str, ratios: Sequence[float], *, improved: bool
    ) -> Tuned:
        return Tuned(strategy, improved, verdict, tuple(ratios), tuple(self._log.trials))

    def _left(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._deadline - self.clock())

    def _comparison(self) -> float:
        """Seconds that the comparison with the baseline may take."""
        return 2 * LEAST_PAIRS * self._wall * RESERVE


def _baseline_error(failure: Failure, budget: float, room: float) -> LaunchError | TraceError:
    """What is wrong with a script of which not even the first run worked."""
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
    return LaunchError(f"the baseline run failed, {failure.reason}; mend the script first")


def _steps(measurement: Measurement) -> set[int]:
    return {event.step for event in measurement.trace.events}


def _change(gain: float) -> str:
    return f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
