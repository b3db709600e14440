"""The log of a tuner: what was tried, the result, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
