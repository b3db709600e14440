"""The log of a tuner: what was tried, the result, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    @classmethod
    def of(
        cls,
        base: Strategy,
        strategy: Strategy,
        prediction: Prediction | None,
        outcome: Measurement | Failure | None,
        reason: str,
    ) -> Trial:
        """One run (``outcome`` None: there was none), in seconds that compare with ``base``."""
        # Iterations of this strategy that take as many batches as one of the baseline.
        scale = base.gradients.accumulate / strategy.gradients.accumulate
        predicted = prediction.seconds * scale if prediction else None
        status: Status = "not measured"
        measured = spread = None
        if isinstance(outcome, Measurement):
            measured, spread, status = outcome.seconds * scale, outcome.spread * scale, "measured"
        elif outcome:
            reason, status = f"{reason}; {outcome.reason}", outcome.status
        name, settings = label(strategy), strategy.document()
        return cls(name, settings, predicted, measured, spread, reason, status)
