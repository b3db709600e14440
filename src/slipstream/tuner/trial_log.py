"""What was tried, what came of it and why: the log of a tuner.

Never runs anything and never writes a file.
"""

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
    """One strategy that was run, or was not, and why; seconds are those of one iteration.

    Iterations of strategies that accumulate differently are not alike: ``predicted`` and
    ``measured`` are then seconds for as many batches as one iteration of the baseline takes.
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
    """Every trial so far; seconds in it are those of an iteration of ``base``.

    Attributes:
        base: the strategy that all others are compared with.
        notify: gets the trials after every new one.
    """

    base: Strategy
    notify: Callable[[Sequence[Trial]], None]
    trials: list[Trial] = field(default_factory=list, init=False)

    def predicted(self, prediction: Prediction) -> float:
        """Predicted seconds for as many batches as an iteration of the baseline takes."""
        return prediction.per_batch * self.base.gradients.accumulate

    def seconds(self, strategy: Strategy, measurement: Measurement) -> float:
        """Measured seconds for as many batches as an iteration of the baseline takes."""
        return measurement.seconds * self._batches(strategy)

    def add(
        self,
        strategy: Strategy,
        prediction: Prediction | None,
        outcome: Measurement | Failure | None,
        reason: str,
    ) -> None:
        """Note one run, or why there was none."""
        ran = outcome if isinstance(outcome, Measurement) else None
        failed = outcome if isinstance(outcome, Failure) else None
        self.trials.append(
            Trial(
                name=label(strategy),
                strategy=strategy.document(),
                predicted=self.predicted(prediction) if prediction else None,
                measured=self.seconds(strategy, ran) if ran else None,
                spread=ran.spread * self._batches(strategy) if ran else None,
                reason=f"{reason}; {failed.reason}" if failed else reason,
                status="measured" if ran else failed.status if failed else "not measured",
            )
        )
        self.notify(self.trials)

    def _batches(self, strategy: Strategy) -> float:
        """Iterations of ``strategy`` that take as many batches as one of the baseline."""
        return self.base.gradients.accumulate / strategy.gradients.accumulate
