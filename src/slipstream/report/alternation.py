"""Several trainings that took turns, an iteration each: what a chart and a table show of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Literal, NamedTuple

from slipstream.report.palette import PAPER, Swatch

TrainingKind = Literal["baseline", "exact", "lossy", "floor"]

KINDS: Mapping[TrainingKind, Swatch] = {
    "baseline": Swatch("the baseline", "#44546a", PAPER),
    "exact": Swatch("exact: the same mathematics", "#0072b2", PAPER),
    "lossy": Swatch("lossy: an approximation", "#e69f00"),
    "floor": Swatch("no exchange: nothing is faster", "#c3c9cf"),
}


class TimedTraining(NamedTuple):
    """One of them.

    ``seconds`` are those of its iterations, ``gain`` says what it gains over the baseline,
    ``results`` are further columns of the table, by heading; missing ones stay empty.
    """

    name: str
    kind: TrainingKind
    seconds: Sequence[float]
    gain: str = ""
    results: Mapping[str, str] = {}

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the iterations.

        Example:
            >>> TimedTraining("one", "exact", [3.0, 1.0, 2.0]).quartiles
            (1.5, 2.0, 2.5)
            >>> TimedTraining("one", "exact", [1.0]).quartiles
            (1.0, 1.0, 1.0)
        """
        values = self.seconds if len(self.seconds) > 1 else [*self.seconds, *self.seconds]
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return low, middle, high


class Alternation(NamedTuple):
    """The trainings in the order of display, and what they show, in a line."""

    headline: str
    trainings: Sequence[TimedTraining]
