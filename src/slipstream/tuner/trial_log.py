"""The log of a tuner: a line for each trial, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction, late_share
from slipstream.strategy import Strategy, late_by
from slipstream.tuner.trials import Failure, Measurement

Status = Literal["measured", "failed", "hanging", "no trace", "not measured"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One strategy that was run, or was not, and why.

    ``predicted``, ``measured`` and ``spread`` are seconds for as many batches as one iteration of
    the baseline takes, so that strategies that accumulate differently compare. Where the number of
    updates of the training is known, the first two are means over these. ``interval`` holds what is
    measured with a probability of 80 %, where it was predicted.
    """

    name: str
    strategy: Mapping[str, Any]
    predicted: float | None
    measured: float | None
    spread: float | None
    reason: str
    status: Status
    interval: tuple[float, float] | None = None


class Tuned(NamedTuple):
    """The strategy to use and the proof: ``ratios`` are its time over the baseline's, by pair."""

    strategy: Strategy
    improved: bool
    verdict: str
    ratios: tuple[float, ...]
    trials: tuple[Trial, ...]


@dataclass
class TrialLog:
    """All trials so far.

    Args:
        base: the baseline.
        notify: called with all trials after each new one.
        updates: of the whole training; those before a codec begins count as the baseline's.
    """

    base: Strategy
    notify: Callable[[Sequence[Trial]], None]
    updates: int | None = None
    _trials: list[Trial] = field(default_factory=list, init=False)
    _dense: float | None = field(default=None, init=False)  # seconds of the baseline

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All of them, in their order."""
        return tuple(self._trials)

    def note(
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
        interval = None
        if prediction is not None:
            low, high = prediction.interval
            interval = low * scale, high * scale
        status: Status = "not measured"
        measured = spread = None
        if isinstance(outcome, Measurement):
            measured, spread, status = outcome.seconds * scale, outcome.spread * scale, "measured"
            if self._dense is None:
                self._dense = measured
            elif late_by(self.base.gradients.codec) == 0:
                late = late_share(strategy, self.updates)
                measured = (1 - late) * measured + late * self._dense
        elif outcome:
            reason, status = f"{reason}; {outcome.reason}", outcome.status
        name, settings = label(strategy), strategy.document()
        trial = Trial(name, settings, predicted, measured, spread, reason, status, interval)
        self._trials.append(trial)
        self.notify(self._trials)
        return measured

    def result(self, strategy: Strategy, verdict: str, ratios: Sequence[float] = ()) -> Tuned:
        """The end: the strategy to use, and why."""
        improved = strategy != self.base
        return Tuned(strategy, improved, verdict, tuple(ratios), self.trials)
