"""The sections of the report: words, tables and plots of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from slipstream.advisor.findings import Finding
from slipstream.analysis.time_unit import TimeUnit
from slipstream.report import page
from slipstream.report.alternation import Alternation
from slipstream.report.bars import MOST_BARS, lay_out
from slipstream.report.palette import PALETTE, PARTS, chart_unit
from slipstream.report.plots import (
    alternation_plot,
    breakdown_plot,
    comparison_plot,
    timeline_plot,
)
from slipstream.report.runs import Comparison, RecordedRun, comparisons, pairs

_MOST_COMPARED = 24
"""Pairs of bars in one plot; the table below it has all."""


def cards(runs: Sequence[RecordedRun]) -> Iterable[tuple[str, str, str]]:
    """The last measured run in large letters, and how it compares with the first."""
    first = runs[0]
    last = next((run for run in reversed(runs) if not run.predicted), first)
    hosts = len(set(last.meta.get("hosts") or []))
    exposed, unit = last.parts["exposed"], chart_unit(last.iteration)
    change = last.change_from(first)
    if last.meta.get("model"):
        yield "model", last.model, ""
    yield "ranks", f"{last.ranks:,}", f"on {hosts:,} host{'s' * (hosts != 1)}" if hosts else ""
    yield "strategy", last.strategy, ""
    remark = f"{change} than {first.name}" if change else last.title
    yield "iteration", unit(last.iteration), remark
    if rate := last.samples_per_second:
        yield "samples a second", _four_digits(rate), "over all ranks"
    yield "exposed exchange", _share(exposed, last.iteration), f"{unit(exposed)} an iteration"


def alternation(alternation: Alternation) -> str:
    """Trainings that took turns; includes plotly's script."""
    trainings = alternation.trainings
    unit = chart_unit(max(one.quartiles[2] for one in trainings))
    more = dict.fromkeys(heading for one in trainings for heading in one.results)
    rows = [
        [one.name, *(unit(seconds) for seconds in one.quartiles), one.gain]
        + [one.results.get(heading, "") for heading in more]
        for one in trainings
    ]
    headings = ["training", "first quartile", "median", "third quartile", "as fast", *more]
    plot = page.plot("alternation", alternation_plot(trainings), with_library=True)
    remark = (
        f"{len(trainings[0].seconds)} iterations of each, in turn. A bar ends at the median, the "
        "line across its end at the quartiles; a dot is an iteration."
    )
    table = page.table(headings, rows)
    return page.section("alternation", alternation.headline, remark, plot, table)


def timelines(runs: Sequence[RecordedRun], *, with_library: bool = True) -> str:
    """A typical step of each run, all on one scale of time.

    Includes plotly's script, unless another section does.
    """
    drawings = [lay_out(run, MOST_BARS // len(runs)) for run in runs]
    end = max(drawing.end for drawing in drawings)
    kinds = {bar.kind for drawing in drawings for bar in drawing.bars}
    content = [page.key(kind for kind in PALETTE if kind in kinds)]
    for number, (run, drawing) in enumerate(zip(runs, drawings, strict=True)):
        figure = timeline_plot(drawing, end)
        plot = page.plot(f"timeline-{number}", figure, with_library=with_library and number == 0)
        content += [page.heading(run.title, drawing.note), plot]
    remark = (
        "Each rank: compute, and below it its exchanges, by number. An exchange is hidden while "
        "forward or backward run beside it; an exposed exchange costs time. Point at a bar for "
        "its numbers, drag to zoom, double-click to zoom out."
    )
    return page.section("timeline", "One iteration", remark, *content)


def breakdowns(runs: Sequence[RecordedRun]) -> str:
    """The parts of an iteration of each run, as bars and as numbers."""
    unit = chart_unit(max(run.iteration for run in runs))
    columns = [["part", *(PALETTE[part].name for part in PARTS), "iteration"]]
    for run in runs:
        cells = [f"{unit(part)} ({_share(part, run.iteration)})" for part in run.parts.values()]
        columns.append([run.title, *cells, unit(run.iteration)])
    headings, *rows = zip(*columns, strict=True)
    plot = page.plot("breakdown", breakdown_plot(runs), with_library=False)
    content = [page.key(PARTS), plot, page.table(headings, rows, totals=True)]
    if len(runs) > 1:
        content.append(_run_table(runs))
    remark = (
        "Means over the middle half of the iterations, then over ranks. Time covered by several "
        "kinds counts once, as compute first. Hatched: predicted."
    )
    return page.section("breakdown", "Where the time goes", remark, *content)


def findings(runs: Sequence[RecordedRun], by_name: Mapping[str, Sequence[Finding]]) -> str:
    """The findings in the runs."""
    if not by_name:
        return ""
    iterations = {run.name: run.iteration for run in reversed(runs)}
    content = []
    for name, of_run in by_name.items():
        content += [page.heading(name)] if len(by_name) > 1 else []
        content += [page.finding_card(finding, iterations.get(name, 0.0)) for finding in of_run]
        content += [] if of_run else ["<p>None.</p>"]
    remark = (
        "What the trace shows, what to do about it, and the settings to merge into the strategy. "
        "Gains of several findings do not add up."
    )
    return page.section("findings", "Findings", remark, *content)


def predictions(runs: Sequence[RecordedRun], trials: Sequence[Mapping[str, Any]]) -> str:
    """Show how far predictions are from measurements: of runs, part by part, and of trials."""
    matched = pairs(runs)
    compared = comparisons(matched, trials)
    if not compared:
        return ""
    errors = [abs(one.error) for one in compared]
    unit = chart_unit(max(max(one.predicted, one.measured) for one in compared))
    rows = [
        [one.name, _with_interval(one, unit), _with_spread(one, unit), f"{one.error:+.1%}"]
        for one in compared
    ]
    figure = comparison_plot(compared[:_MOST_COMPARED])
    content = [page.plot("compared", figure, with_library=False)]
    content.append(page.table(["", "predicted", "measured", "difference"], rows))
    for prediction, measured in matched:
        title = page.heading(f"{measured.name}, part by part")
        content += [title, _part_by_part(prediction, measured)]
    remark = (
        f"Predictions are off by {median(errors):.1%} (median) and {max(errors):.1%} (worst). "
        "In brackets: where four of five measurements are expected. Spread: half the distance "
        "between the quartiles."
    )
    return page.section("predictions", "Predicted against measured", remark, *content)


def trials(log: Sequence[Mapping[str, Any]]) -> str:
    """Every strategy that the tuner tried or skipped."""
    if not log:
        return ""
    measured = sum(trial.get("measured") is not None for trial in log)
    remark = f"{len(log)} in the order of the log, {measured} of them measured."
    return page.section("trials", "Trials of the tuner", remark, page.trials_table(log))


def _run_table(runs: Sequence[RecordedRun]) -> str:
    """Configuration and speed of each run, and its change from the first."""
    rows = []
    for run in runs:
        took, change = chart_unit(run.iteration)(run.iteration), run.change_from(runs[0]) or "-"
        speed = _four_digits(run.samples_per_second) if run.samples_per_second else "-"
        rows.append([run.title, run.model, f"{run.ranks:,}", run.strategy, took, speed, change])
    headings = ["trace", "model", "ranks", "strategy", "iteration", "samples/s", "change"]
    return page.table(headings, rows, words=(0, 1, 3))


def _part_by_part(prediction: RecordedRun, measured: RecordedRun) -> str:
    unit = chart_unit(max(prediction.iteration, measured.iteration))
    names = [*(PALETTE[part].name for part in PARTS), "iteration"]
    predicted, real = ([*run.parts.values(), run.iteration] for run in (prediction, measured))
    rows = [
        [name, unit(before), unit(after), f"{'+' * (before > after)}{unit(before - after)}"]
        for name, before, after in zip(names, predicted, real, strict=True)
    ]
    return page.table(["part", "predicted", "measured", "difference"], rows, totals=True)


def _with_interval(one: Comparison, unit: TimeUnit) -> str:
    if one.interval is None:
        return unit(one.predicted)
    low, high = (unit(end) for end in one.interval)
    return f"{unit(one.predicted)} ({low} to {high})"


def _with_spread(one: Comparison, unit: TimeUnit) -> str:
    return unit(one.measured) + (f" \u00b1 {unit(one.spread)}" if one.spread else "")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _four_digits(value: float) -> str:
    """Write a number with four digits at least."""
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f}"
