"""Draws traces as one HTML page that needs nothing else, and as a PNG picture.

Never measures and never judges: findings and trials are handed in, numbers come from ``breakdown``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.advisor.findings import Finding
from slipstream.errors import TraceError
from slipstream.report import sections as sections
from slipstream.report.bars import MOST_BARS
from slipstream.report.page import page
from slipstream.report.picture import picture
from slipstream.report.subject import Subject
from slipstream.trace.event import Trace

Named = Sequence[tuple[str, Trace]]
"""Traces, each under the name that the report calls it by."""


def html(
    measured: Named,
    predicted: Named = (),
    findings: Mapping[str, Sequence[Finding]] | None = None,
    trials: Sequence[Mapping[str, Any]] = (),
) -> str:
    """One page: the iteration of each trace, breakdowns, findings, predictions and trials.

    It holds all it needs (most of it plotly's script) and loads nothing. Of many ranks it shows 16.
    A predicted trace is compared with the measured one of its name, else of the same strategy and
    segments.

    Args:
        measured: Traces of runs in the order of display; others are compared to the first.
        predicted: Traces that were simulated.
        findings: By the name of the trace that they were found in.
        trials: A tuner's log, ``{"name", "strategy", "predicted", "measured", "spread", "reason",
            "status"}``, in seconds an iteration; only ``name`` must be there.

    Raises:
        TraceError: There is no trace, or one without an iteration, or plotly is not installed.

    Example:
        >>> from slipstream.trace.event import Event
        >>> run = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("forward", 0, 2, 0.0, 0.4)))
        >>> "500.0 ms" in html([("run", run)])
        True
    """
    _require("plotly", "a page")
    subjects = _subjects(measured, predicted)
    title = f"{subjects[0].model} on {subjects[0].ranks:,} rank{'s' * (subjects[0].ranks != 1)}"
    names = ", ".join(map(sections.title, subjects))
    content = [
        sections.timelines(subjects),
        sections.breakdowns(subjects),
        sections.findings(subjects, findings or {}),
        sections.predictions(subjects, trials),
        sections.trials(trials),
    ]
    return page(title, f"slipstream report: {names}", sections.cards(subjects), "".join(content))


def png(measured: Named, predicted: Named = ()) -> bytes:
    """The timelines alone, one below the other on one scale of time.

    Raises:
        TraceError: There is no trace, or one without an iteration, or matplotlib is not installed.

    Example:
        >>> from slipstream.trace.event import Event
        >>> run = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("forward", 0, 2, 0.0, 0.4)))
        >>> png([("run", run)])[1:4]
        b'PNG'
    """
    _require("matplotlib", "a picture")
    subjects = _subjects(measured, predicted)
    most_bars = MOST_BARS // len(subjects)
    return picture([(sections.title(subject), subject.drawing(most_bars)) for subject in subjects])


def read_trials(path: str | Path) -> list[dict[str, Any]]:
    """The log of a tuner, as ``html`` takes it.

    Raises:
        TraceError: The file cannot be read, or is no such log.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "trials.json")
        ...     _ = path.write_text('[{"name": "per_layer", "measured": 0.5}]')
        ...     read_trials(path)
        [{'name': 'per_layer', 'measured': 0.5}]
    """
    path = Path(path)
    try:
        trials = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read: {error.strerror}. Give the path of a log of trials."
        ) from error
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error!s:.80}. Give a log of trials.") from error
    wrong = "it is no list" if not isinstance(trials, list) else next(_mistakes(trials), "")
    if wrong:
        raise TraceError(
            f"{path} is no log of trials: {wrong}. Give the file that slipstream tune --log wrote: "
            'a list of {"name", "strategy", "predicted", "measured", "spread", "reason", "status"}.'
        )
    return list(trials)


def _mistakes(trials: list[Any]) -> Iterator[str]:
    """What keeps entries from being trials."""
    for number, trial in enumerate(trials, 1):
        if not isinstance(trial, dict) or not isinstance(trial.get("name"), str):
            yield f"entry {number} has no name"
            continue
        for field in ("predicted", "measured", "spread"):
            value = trial.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                yield f"{field} of entry {number} is {value!r:.40}, not a number of seconds or null"


def _require(package: str, purpose: str) -> None:
    if find_spec(package) is None:
        raise TraceError(
            f"{purpose} of the report needs {package}, which is not installed: "
            "in the checkout, pip install '.[report]'"
        )


def _subjects(measured: Named, predicted: Named) -> list[Subject]:
    subjects = [Subject.of(name, trace, predicted=False) for name, trace in measured]
    subjects += [Subject.of(name, trace, predicted=True) for name, trace in predicted]
    if not subjects:
        raise TraceError("a report needs a trace, and there is none: give one or more.")
    return subjects
