"""The log of a tuner: what was tried, the result, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.planner.candidates import label
from slipstream.planner.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.tuner.trials import Failure, Measurement

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


@dataclass
class TrialLog:
    """All trials so far.

    Attributes:
        base: the strategy that all others are compared with.
        notify: called with all trials after each new one.
    """

    base: Strategy
    notify: Callable[[Sequence[Trial]], None]
    trials: list[Trial] = field(default_factory=list, init=False)

    def predicted(self, prediction: Prediction) -> float:
        """Predicted seconds for as many batches as an iteration of the baseline takes."""
        return prediction.per_batch * self.base.gradients.accumulate

    def add(
        self,
        strategy: Strategy,
        prediction: Prediction | None,
        outcome: Measurement | Failure | None,
        reason: str,
    ) -> float | None:
        """Note one run (``outcome`` None: there was none) and the reason.

        Returns:
            Its measured seconds, as in `Trial`; None without a measurement.
        """
        # Iterations of this strategy that take as many batches as one of the baseline.
        scale = self.base.gradients.accumulate / strategy.gradients.accumulate
        ran = outcome if isinstance(outcome, Measurement) else None
        failed = outcome if isinstance(outcome, Failure) else None
        measured = ran.seconds * scale if ran else None
        self.trials.append(
            Trial(
                name=label(strategy),
                strategy=strategy.document(),
                predicted=self.predicted(prediction) if prediction else None,
                measured=measured,
                spread=ran.spread * scale if ran else None,
                reason=f"{reason}; {failed.reason}" if failed else reason,
                status="measured" if ran else failed.status if failed else "not measured",
            )
        )
        self.notify(self.trials)
        return measured
