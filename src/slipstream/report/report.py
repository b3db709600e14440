"""Draws traces as one self-contained HTML page, and as a PNG picture.

Measures nothing: the caller passes findings and trials; numbers come from ``slipstream.analysis``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.advisor.findings import Finding
from slipstream.errors import TraceError
from slipstream.planner.progress.calibration import LossCalibration
from slipstream.report import sections
from slipstream.report.alternation import Alternation
from slipstream.report.bars import MOST_BARS, lay_out
from slipstream.report.losses import losses as loss_section
from slipstream.report.page import page
from slipstream.report.picture import picture
from slipstream.report.runs import RecordedRun
from slipstream.trace.chrome import load_json
from slipstream.trace.event import Trace

_MOST_SECONDS = 1e9

Named = Sequence[tuple[str, Trace]]
"""Traces, each with the name that the report gives it."""


def html(
    measured: Named,
    predicted: Named = (),
    findings: Mapping[str, Sequence[Finding]] | None = None,
    trials: Sequence[Mapping[str, Any]] = (),
    alternation: Alternation | None = None,
    losses: LossCalibration | None = None,
) -> str:
    """One page: the iteration of each trace, breakdowns, findings, predictions and trials.

    The page is self-contained (plotly's script is most of it) and loads nothing. Of many ranks it
    shows 16. A predicted trace is compared with the measured one of its name, else of the same
    strategy and segments.

    Args:
        measured: Recorded traces in the order of display; all are compared with the first.
        predicted: Simulated traces.
        findings: By the name of the trace in which they were found.
        trials: A tuner's log, ``{"name", "strategy", "predicted", "measured", "spread", "reason",
            "status"}``, in seconds an iteration; only ``name`` is required.
        alternation: Trainings that took turns; they come first.
        losses: Of short runs, whose continuation is drawn.

    Raises:
        TraceError: There is no trace, or one without an iteration, or plotly is not installed.

    Example:
        >>> from slipstream.trace.event import Event
        >>> run = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("forward", 0, 2, 0.0, 0.4)))
        >>> "500.0 ms" in html([("run", run)])
        True
    """
    _require("plotly", "a page")
    runs = _runs(measured, predicted)
    title = f"{runs[0].model} on {runs[0].ranks:,} rank{'s' * (runs[0].ranks != 1)}"
    names = ", ".join(run.title for run in runs)
    body = sections.alternation(alternation) if alternation else ""
    body += sections.timelines(runs, with_library=not body) + sections.breakdowns(runs)
    body += loss_section(losses) if losses else ""
    body += sections.findings(runs, findings or {})
    body += sections.predictions(runs, trials) + sections.trials(trials)
    return page(title, f"slipstream report: {names}", sections.cards(runs), body)


def png(measured: Named, predicted: Named = ()) -> bytes:
    """PNG data: the timelines alone, one below the other on one scale of time.

    Raises:
        TraceError: There is no trace, or one without an iteration, or matplotlib is not installed.

    Example:
        >>> from slipstream.trace.event import Event
        >>> run = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("forward", 0, 2, 0.0, 0.4)))
        >>> png([("run", run)])[1:4]
        b'PNG'
    """
    _require("matplotlib", "a picture")
    runs = _runs(measured, predicted)
    return picture([(run.title, lay_out(run, MOST_BARS // len(runs))) for run in runs])


def read_trials(path: str | Path) -> list[dict[str, Any]]:
    """Read the log of a tuner, in the form ``html`` takes.

    Raises:
        TraceError: The file cannot be read, or is not such a log.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "trials.json")
        ...     _ = path.write_text('[{"name": "per_layer", "measured": 0.5}]')
        ...     read_trials(path)
        [{'name': 'per_layer', 'measured': 0.5}]
    """
    trials = load_json(path, "a tuner's log")
    mistake = next(_mistakes(trials), "") if isinstance(trials, list) else "it is not a list"
    if mistake:
        raise TraceError(
            f"{path} is not a tuner's log: {mistake}. Give the file written by slipstream "
            'tune --log: a list of {"name", "strategy", "predicted", "measured", "spread", '
            '"reason", "status"}.'
        )
    return list(trials)


def _mistakes(trials: list[Any]) -> Iterator[str]:
    """Why entries are not trials."""
    for number, trial in enumerate(trials, 1):
        if not isinstance(trial, dict) or not isinstance(trial.get("name"), str):
            yield f"entry {number} has no name"
            continue
        for field in ("predicted", "measured", "spread"):
            value = trial.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                yield f"{field} of entry {number} is {value!r:.40}, not a number of seconds or null"
            elif value is not None and not 0 <= value <= _MOST_SECONDS:
                yield f"{field} of entry {number} is {value!r:.40}, not a number of seconds"
        for field, kind in {"strategy": dict, "reason": str, "status": str}.items():
            if not isinstance(value := trial.get(field), kind | None):
                yield f"{field} of entry {number} is {value!r:.40}"


def _require(package: str, purpose: str) -> None:
    if find_spec(package) is None:
        raise TraceError(
            f"{purpose} of the report needs {package}, which is not installed. Run this in the "
            "checkout: pip install '.[report]'"
        )


def _runs(measured: Named, predicted: Named) -> list[RecordedRun]:
    runs = [RecordedRun.of(name, trace, predicted=False) for name, trace in measured]
    runs += [RecordedRun.of(name, trace, predicted=True) for name, trace in predicted]
    if not runs:
        raise TraceError("a report needs a trace, but there is none: give one or more.")
    return runs
