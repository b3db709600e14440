"""What stands in each section of the report: words, tables and plots of its traces.

Never knows how a page is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from slipstream.advisor.findings import Finding
from slipstream.report import page as page
from slipstream.report.bars import MOST_BARS
from slipstream.report.look import LOOKS, Unit
from slipstream.report.plots import (
    PARTS,
    Compared,
    breakdown_plot,
    compared_plot,
    timeline_plot,
)
from slipstream.report.subject import Subject, compared, pairs

_MOST_COMPARED = 24
"""Pairs of bars in one plot; the table below it has all."""


def cards(subjects: Sequence[Subject]) -> Iterable[tuple[str, str, str]]:
    """The last measured trace in large letters, and how it compares with the first."""
    first = subjects[0]
    last = next((subject for subject in reversed(subjects) if not subject.predicted), first)
    hosts = last.meta.get("hosts") or []
    exposed = last.middle.spread("exposed").median
    unit = Unit.of(last.iteration)
    change = (
        f"{_change(last, first)} than {first.name}" if _comparable(last, first) else title(last)
    )
    if last.meta.get("model"):
        yield "model", last.model, ""
    yield "ranks", f"{last.ranks:,}", f"on {_count(len(set(hosts)), 'host')}" if hosts else ""
    yield "strategy", last.strategy, ""
    yield "iteration", unit(last.iteration), change
    if rate := last.samples_per_second:
        yield "samples a second", _number(rate), "over all ranks"
    yield "exposed exchange", _share(exposed, last.iteration), f"{unit(exposed)} an iteration"


def timelines(subjects: Sequence[Subject]) -> str:
    """A typical step of each trace, all on one scale of time; brings plotly's script."""
    drawings = [subject.drawing(MOST_BARS // len(subjects)) for subject in subjects]
    end = max(drawing.end for drawing in drawings)
    kinds = {bar.kind for drawing in drawings for bar in drawing.bars}
    content = [page.key(kind for kind in LOOKS if kind in kinds)]
    for number, (subject, drawing) in enumerate(zip(subjects, drawings, strict=True)):
        figure = timeline_plot(drawing, end)
        content += [
            page.heading(title(subject), drawing.note),
            page.plot(f"timeline-{number}", figure, with_library=number == 0),
        ]
    remark = (
        "Each rank: compute, and below it its exchanges, by number. An exchange is hidden while "
        "forward or backward run beside it; what is exposed costs time. Point at a bar for its "
        "numbers, drag to zoom, double-click to return."
    )
    return page.section("timeline", "One iteration", remark, *content)


def breakdowns(subjects: Sequence[Subject]) -> str:
    """The parts of an iteration of each trace, as bars and as numbers."""
    stacks = [subject.stack() for subject in subjects]
    unit = Unit.of(max(stack.iteration for stack in stacks))
    rows = [
        [
            LOOKS[part].name,
            *(f"{unit(s.parts[part])} ({_share(s.parts[part], s.iteration)})" for s in stacks),
        ]
        for part in PARTS
    ]
    rows.append(["iteration", *(unit(stack.iteration) for stack in stacks)])
    content = [
        page.key(PARTS),
        page.plot("breakdown", breakdown_plot(stacks), with_library=False),
        page.table(["part", *map(title, subjects)], rows, last_strong=True),
    ]
    if len(subjects) > 1:
        content.append(_comparison(subjects))
    remark = (
        "Medians over iterations, then over ranks. Time that several kinds cover counts once: for "
        "compute first. Hatched: predicted."
    )
    return page.section("breakdown", "Where the time goes", remark, *content)


def _comparison(subjects: Sequence[Subject]) -> str:
    """What was run, and how fast, against the first trace."""
    first = subjects[0]
    rows = [
        [
            title(subject),
            subject.model,
            f"{subject.ranks:,}",
            subject.strategy,
            Unit.of(subject.iteration)(subject.iteration),
            _number(subject.samples_per_second) if subject.samples_per_second else "-",
            _change(subject, first) if _comparable(subject, first) else "-",
        ]
        for subject in subjects
    ]
    headings = ["trace", "model", "ranks", "strategy", "iteration", "samples/s", "change"]
    return page.table(headings, rows, words=(0, 1, 3))


def findings(subjects: Sequence[Subject], found: Mapping[str, Sequence[Finding]]) -> str:
    """What was found in the traces."""
    if not found:
        return ""
    iterations = {subject.name: subject.iteration for subject in reversed(subjects)}
    content = []
    for name, own in found.items():
        content += [page.heading(name)] if len(found) > 1 else []
        content.append(page.findings_list(own, iterations.get(name, 0.0)) or "<p>Nothing.</p>")
    remark = (
        "What the trace says, what to do about it, and the settings to merge into the strategy. "
        "Gains of several findings do not add up."
    )
    return page.section("findings", "Findings", remark, *content)


def predictions(subjects: Sequence[Subject], log: Sequence[Mapping[str, Any]]) -> str:
    """How far predictions are from what was measured: of traces, part by part, and of trials."""
    matched = pairs(subjects)
    found = compared(matched, log)
    if not found:
        return ""
    errors = [abs(one.error) for one in found]
    unit = Unit.of(max(max(one.predicted, one.measured) for one in found))
    rows = [
        [one.name, unit(one.predicted), _measured(one, unit), f"{one.error:+.1%}"] for one in found
    ]
    content = [
        page.plot("compared", compared_plot(found[:_MOST_COMPARED]), with_library=False),
        page.table(["", "predicted", "measured", "difference"], rows),
    ]
    for prediction, measured in matched:
        content += [
            page.heading(f"{measured.name}, part by part"),
            _part_by_part(prediction, measured),
        ]
    remark = (
        f"Predictions are off by {median(errors):.1%} (median) and {max(errors):.1%} (worst). "
        "Spread: half the distance between the quartiles."
    )
    return page.section("predictions", "Predicted against measured", remark, *content)


def _measured(one: Compared, unit: Unit) -> str:
    return unit(one.measured) + (f" \u00b1 {unit(one.spread)}" if one.spread else "")


def _part_by_part(prediction: Subject, measured: Subject) -> str:
    ours, theirs = prediction.stack(), measured.stack()
    unit = Unit.of(max(ours.iteration, theirs.iteration))
    rows = [
        [
            LOOKS[part].name,
            unit(ours.parts[part]),
            unit(theirs.parts[part]),
            _signed(ours.parts[part] - theirs.parts[part], unit),
        ]
        for part in PARTS
    ]
    apart = _signed(ours.iteration - theirs.iteration, unit)
    rows.append(["iteration", unit(ours.iteration), unit(theirs.iteration), apart])
    return page.table(["part", "predicted", "measured", "difference"], rows, last_strong=True)


def trials(log: Sequence[Mapping[str, Any]]) -> str:
    """Everything that a tuner tried or passed over."""
    if not log:
        return ""
    ran = sum(trial.get("measured") is not None for trial in log)
    remark = f"{len(log)} in the order of the log, {ran} of them measured."
    return page.section("trials", "Trials of the tuner", remark, page.trials_table(log))


def title(subject: Subject) -> str:
    """The name of a trace, and whether it is one of a run."""
    return f"{subject.name} (predicted)" if subject.predicted else subject.name


def _comparable(one: Subject, first: Subject) -> bool:
    return one is not first and one.job() == first.job() and first.iteration > 0


def _change(one: Subject, first: Subject) -> str:
    """How much shorter or longer an iteration is."""
    change = one.iteration / first.iteration - 1
    return f"{abs(change):.1%} {'shorter' if change < 0 else 'longer'}"


def _signed(seconds: float, unit: Unit) -> str:
    return f"{'+' * (seconds > 0)}{unit(seconds)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _number(value: float) -> str:
    """Four digits at least."""
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f}"
