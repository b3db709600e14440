"""A trace that a report is about: its name, its numbers, and which others it compares with.

Never draws.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from slipstream.analysis.breakdown import Typical, typical
from slipstream.analysis.summary import strategy_words
from slipstream.analysis.throughput import samples_per_second
from slipstream.errors import StrategyError
from slipstream.report.bars import Drawing, lay_out
from slipstream.report.plots import PARTS, Compared, Stack
from slipstream.strategy import Strategy
from slipstream.trace.event import Trace
from slipstream.trace.timeline import Iteration, timeline


@dataclass(frozen=True, slots=True)
class Subject:
    """One trace of the report; ``of`` makes it."""

    name: str
    predicted: bool
    meta: Mapping[str, Any]
    iterations: Sequence[Iteration]
    middle: Typical

    @classmethod
    def of(cls, name: str, trace: Trace, *, predicted: bool) -> Subject:
        """Everything a report asks of a trace, computed once."""
        iterations = timeline(trace.events)
        return cls(name, predicted, trace.meta, iterations, typical(iterations))

    @property
    def iteration(self) -> float:
        """Seconds, the median over ranks of medians over iterations, as in the summary."""
        return self.middle.spread("iteration").median

    @property
    def ranks(self) -> int:
        """How many there were; a simulated trace may hold the events of fewer."""
        return int(self.meta.get("world_size") or len(self.middle.ranks))

    @property
    def samples_per_second(self) -> float:
        """Over all ranks; 0 where the trace does not say."""
        return (samples_per_second(self.iterations) or 0.0) * self.ranks / len(self.middle.ranks)

    @property
    def model(self) -> str:
        """Its name, as far as known."""
        return str(self.meta.get("model") or "a model")

    @property
    def strategy(self) -> str:
        """In few words, and how many segments it made."""
        words = list(strategy_words(self.meta.get("strategy") or {}))
        if segments := self.meta.get("segments"):
            words.append(f"{len(segments)} segment{'s' * (len(segments) != 1)}")
        return ", ".join(words) or "unknown"

    def stack(self) -> Stack:
        """The parts of an iteration, medians over ranks, as in the summary."""
        parts = {part: self.middle.spread(part).median for part in PARTS}
        return Stack(self.name, parts, self.iteration, self.predicted)

    def drawing(self, most_bars: int) -> Drawing:
        """The bars of a typical step."""
        return lay_out(self.iterations, self.middle, self.meta, most_bars)

    def job(self) -> tuple[object, ...]:
        """What was trained on how many ranks; only iterations of one job compare."""
        return self.meta.get("model"), self.ranks

    def run(self) -> tuple[object, ...]:
        """What a prediction of this very run has in common with it.

        Two ways to ask for one split are alike: segments count, where they are known.
        """
        settings = _complete(self.meta.get("strategy") or {})
        gradients = dict(settings.get("gradients") or {})
        split = gradients.pop("split", None)
        if segments := self.meta.get("segments"):
            split = [segment.get("bytes") for segment in segments]
        rest = settings | {"gradients": gradients, "trace": None}
        return self.ranks, json.dumps([rest, split], sort_keys=True, default=str)


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with all defaults; unchanged where another version made them."""
    try:
        return Strategy.load(settings).document(full=True)
    except StrategyError:
        return dict(settings)


def pairs(subjects: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
    """Each prediction with the measured trace of its name, else of the same run."""
    found = []
    measured = [subject for subject in subjects if not subject.predicted]
    for prediction in (subject for subject in subjects if subject.predicted):
        alike = [m for m in measured if m.name == prediction.name]
        alike += [m for m in measured if m.run() == prediction.run()]
        found += [(prediction, alike[0])] if alike else []
    return found


def compared(
    pairs: Iterable[tuple[Subject, Subject]], trials: Iterable[Mapping[str, Any]]
) -> list[Compared]:
    """Predicted beside measured: traces, then trials, of which equal names are one.

    Example:
        >>> run = {"name": "by_bytes 8", "predicted": 1.0}
        >>> compared([], [run | {"measured": 1.25}, {"name": "by_bytes 8", "measured": 0.75}])
        [Compared(name='by_bytes 8', predicted=1.0, measured=1.0, spread=0.0)]
    """
    found = [Compared(m.name, p.iteration, m.iteration, _spread(m)) for p, m in pairs]
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for trial in trials:
        by_name[str(trial["name"])].append(trial)
    for name, runs in by_name.items():
        predicted, measured, spread = (
            [run[field] for run in runs if run.get(field) is not None]
            for field in ("predicted", "measured", "spread")
        )
        if predicted and measured:
            found.append(
                Compared(name, predicted[0], median(measured), median(spread) if spread else 0.0)
            )
    return found


def _spread(subject: Subject) -> float:
    """Half the distance between the quartiles of the iterations of the slowest ranks."""
    slowest: dict[int, float] = defaultdict(float)
    for one in subject.iterations:
        slowest[one.step] = max(slowest[one.step], one.duration)
    ordered = sorted(slowest.values())
    return (ordered[3 * (len(ordered) - 1) // 4] - ordered[(len(ordered) - 1) // 4]) / 2
