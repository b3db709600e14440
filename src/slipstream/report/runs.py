"""The runs of a report, measured or predicted: their numbers, and which of them to compare."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from slipstream.analysis.breakdown import TypicalIteration, typical_iteration
from slipstream.analysis.summary import strategy_words
from slipstream.analysis.throughput import samples_per_second
from slipstream.errors import StrategyError
from slipstream.report.palette import PARTS
from slipstream.strategy import Strategy
from slipstream.trace.event import Trace
from slipstream.trace.timeline import Iteration, timeline


class RecordedRun(NamedTuple):
    """One trace of the report; make it with ``of``."""

    name: str
    predicted: bool
    meta: Mapping[str, Any]
    iterations: Sequence[Iteration]
    typical: TypicalIteration

    @classmethod
    def of(cls, name: str, trace: Trace, *, predicted: bool) -> RecordedRun:
        """Compute what the report needs from a trace."""
        iterations = timeline(trace.events)
        return cls(name, predicted, trace.meta, iterations, typical_iteration(iterations))

    @property
    def title(self) -> str:
        """The name, marked if the run is predicted."""
        return f"{self.name} (predicted)" if self.predicted else self.name

    @property
    def iteration(self) -> float:
        """Seconds: the mean over ranks of that over the middle half of their iterations, as in the
        summary."""
        return self.typical.spread("iteration").mean

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of an iteration, means as those of ``iteration``."""
        return {part: self.typical.spread(part).mean for part in PARTS}

    @property
    def ranks(self) -> int:
        """Ranks of the run; a simulated trace may hold the events of fewer."""
        return int(self.meta.get("world_size") or len(self.typical.ranks))

    @property
    def samples_per_second(self) -> float:
        """Over all ranks; 0 if unknown."""
        return (samples_per_second(self.iterations) or 0.0) * self.ranks / len(self.typical.ranks)

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.meta.get("model") or "a model")

    @property
    def strategy(self) -> str:
        """The strategy in a few words, and how many segments it made."""
        words = list(strategy_words(self.meta.get("strategy") or {}))
        if segments := self.meta.get("segments"):
            words.append(f"{len(segments)} segment{'s' * (len(segments) != 1)}")
        return ", ".join(words) or "unknown"

    def change_from(self, first: RecordedRun) -> str | None:
        """Compare the iteration with that of ``first``: how much shorter or longer it is.

        None if the two do not compare: only runs of one model on as many ranks do.
        """
        same_job = (self.meta.get("model"), self.ranks) == (first.meta.get("model"), first.ranks)
        if self is first or not same_job or first.iteration <= 0:
            return None
        change = self.iteration / first.iteration - 1
        return f"{abs(change):.1%} {'shorter' if change < 0 else 'longer'}"

    def configuration(self) -> tuple[object, ...]:
        """Key that a prediction and its measured run share: ranks, segments and settings.

        Different splits that make the same segments count as equal.
        """
        settings = _complete(self.meta.get("strategy") or {})
        gradients = dict(settings.get("gradients") or {})
        split = gradients.pop("split", None)
        if segments := self.meta.get("segments"):
            split = [segment.get("bytes") for segment in segments]
        rest = settings | {"gradients": gradients, "trace": None}
        return self.ranks, json.dumps([rest, split], sort_keys=True, default=str)


class Comparison(NamedTuple):
    """Seconds of an iteration: predicted, measured, and the spread of the measurement; with the
    interval in which the prediction expects four of five measurements, where it says one."""

    name: str
    predicted: float
    measured: float
    spread: float = 0.0
    interval: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """The share of the measured time by which the prediction is too long."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def pairs(runs: Sequence[RecordedRun]) -> list[tuple[RecordedRun, RecordedRun]]:
    """Each prediction with the measured run of its name, else of its configuration."""
    matched = []
    measured = [run for run in runs if not run.predicted]
    for one in (run for run in runs if run.predicted):
        matches = [run for run in measured if run.name == one.name]
        matches += [run for run in measured if run.configuration() == one.configuration()]
        matched += [(one, run) for run in matches[:1]]
    return matched


def comparisons(
    pairs: Iterable[tuple[RecordedRun, RecordedRun]], trials: Iterable[Mapping[str, Any]]
) -> list[Comparison]:
    """Predicted against measured: runs, then trials; trials of one name are merged.

    Example:
        >>> trial = {"name": "by_bytes 4", "predicted": 1.0}
        >>> comparisons([], [trial | {"measured": 1.25}, {"name": "by_bytes 4", "measured": 0.75}])
        [Comparison(name='by_bytes 4', predicted=1.0, measured=1.0, spread=0.0, interval=None)]
    """
    compared = [
        Comparison(m.name, p.iteration, m.iteration, _spread(m), _interval([p.meta]))
        for p, m in pairs
    ]
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for trial in trials:
        by_name[str(trial["name"])].append(trial)
    for name, of_name in by_name.items():
        predicted, measured, spread = (
            [trial[field] for trial in of_name if trial.get(field) is not None]
            for field in ("predicted", "measured", "spread")
        )
        if predicted and measured:
            middle = median(spread) if spread else 0.0
            values = predicted[0], median(measured), middle, _interval(of_name)
            compared.append(Comparison(name, *values))
    return compared


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with all defaults; unchanged if they come from another version."""
    try:
        return Strategy.load(settings).document(full=True)
    except StrategyError:
        return dict(settings)


def _interval(said: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The first interval that any of these says."""
    found = (one["interval"] for one in said if one.get("interval"))
    return next(((float(low), float(high)) for low, high in found), None)


def _spread(run: RecordedRun) -> float:
    """Half the distance between the quartiles of the slowest rank's iterations."""
    slowest: dict[int, float] = defaultdict(float)
    for one in run.iterations:
        slowest[one.step] = max(slowest[one.step], one.duration)
    ordered = sorted(slowest.values())
    return (ordered[3 * (len(ordered) - 1) // 4] - ordered[(len(ordered) - 1) // 4]) / 2
