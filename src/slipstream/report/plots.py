"""The plots of the report, as plotly figures in plain mappings.

Does not import plotly (the page does). Text from a trace is escaped: plotly interprets some HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from slipstream.analysis.time_unit import TimeUnit
from slipstream.report.alternation import KINDS, TimedTraining
from slipstream.report.bars import Bar, Drawing
from slipstream.report.palette import (
    FAINT,
    LINE,
    MEASURED,
    PALETTE,
    PAPER,
    PARTS,
    PREDICTED,
    TEXT,
    Swatch,
    chart_unit,
    shortened,
)
from slipstream.report.runs import Comparison, RecordedRun

Figure = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_ROW = 27
"""Height of a row of the timeline in pixels."""
LOOK = Figure(
    autosize=True,
    showlegend=False,
    paper_bgcolor=PAPER,
    plot_bgcolor=PAPER,
    font={"family": FONT, "size": 13, "color": TEXT},
    uniformtext={"mode": "hide", "minsize": 9},
    hoverlabel={"align": "left", "bgcolor": PAPER, "bordercolor": FAINT},
    hovermode="closest",
    dragmode="zoom",
)


def timeline_plot(drawing: Drawing, end: float) -> Figure:
    """Bars over time, from 0 to ``end`` seconds; zooms along time only."""
    unit = chart_unit(end)
    by_kind = {kind: [bar for bar in drawing.bars if bar.kind == kind] for kind in PALETTE}
    data = [_timeline_bars(PALETTE[kind], bars, unit) for kind, bars in by_kind.items() if bars]
    xaxis = _axis(f"{unit.name} since the step began", end * unit.scale * 1.005)
    yaxis = _names(drawing.ranks, drawing.height + 0.1, -0.1)
    height = round(drawing.height * _ROW + 64)
    return Figure(data=data, layout=_layout(height, "overlay", xaxis, yaxis))


def breakdown_plot(runs: Sequence[RecordedRun]) -> Figure:
    """One stacked bar for each run, with its whole iteration written after it."""
    lengths = [sum(run.parts.values()) for run in runs]
    unit = chart_unit(max(lengths))
    totals = [
        {"x": length * unit.scale, "y": place, "text": f"<b>{unit(run.iteration)}</b>"}
        | {"showarrow": False, "xanchor": "left", "xshift": 6}
        for place, (run, length) in enumerate(zip(runs, lengths, strict=True))
    ]
    xaxis = _axis(f"{unit.name} an iteration", max(lengths) * unit.scale * 1.02)
    yaxis = _rows([shortened(run.name, 24) + "\npredicted" * run.predicted for run in runs])
    more: Figure = {"bargap": 0.3, "annotations": totals}
    layout = _layout(46 * len(runs) + 70, "stack", xaxis, yaxis, right=84, **more)
    return Figure(data=[_breakdown_bars(part, runs, unit) for part in PARTS], layout=layout)


def comparison_plot(comparisons: Sequence[Comparison]) -> Figure:
    """Predicted beside measured, each pair of bars under its name."""
    longest = max(max(one.predicted, one.measured + one.spread) for one in comparisons)
    unit = chart_unit(longest)
    predicted = _comparison_bars(PREDICTED, [one.predicted for one in comparisons], unit, 0.21)
    measured = _comparison_bars(MEASURED, [one.measured for one in comparisons], unit, -0.21)
    spreads = [one.spread * unit.scale for one in comparisons]
    measured["error_x"] = Figure(array=spreads, color=TEXT, thickness=1.2, visible=any(spreads))
    legend = Figure(orientation="h", x=0, y=1, yanchor="bottom", traceorder="normal")
    xaxis = _axis(f"{unit.name} an iteration", longest * unit.scale * 1.04)
    yaxis = _rows([shortened(one.name, 26) for one in comparisons])
    height = 56 * len(comparisons) + 92
    layout = _layout(height, "overlay", xaxis, yaxis, top=34, showlegend=True, legend=legend)
    return Figure(data=[predicted, measured], layout=layout)


def alternation_plot(trainings: Sequence[TimedTraining]) -> Figure:
    """A bar to each median, a line between the quartiles, and a dot for each iteration."""
    longest = max(max(one.seconds) for one in trainings)
    unit = chart_unit(longest)
    data = [_alternation_bar(one, row, unit) for row, one in enumerate(trainings)]
    data += [_iterations(one, row, unit) for row, one in enumerate(trainings)]
    xaxis = _axis(f"{unit.name} an iteration", longest * unit.scale * 1.04)
    yaxis = _rows([shortened(one.name, 30) for one in trainings])
    legend = Figure(orientation="h", x=0, y=1, yanchor="bottom", traceorder="normal")
    height = 54 * len(trainings) + 92
    layout = _layout(height, "overlay", xaxis, yaxis, top=34, showlegend=True, legend=legend)
    return Figure(data=data, layout=layout)


def _alternation_bar(one: TimedTraining, row: int, unit: TimeUnit) -> Figure:
    low, middle, high = (value * unit.scale for value in one.quartiles)
    text = f"{unit(one.quartiles[1])}  {one.gain}"
    tip = f"<b>{escape(one.name)}</b><br>{text}<br>quartiles {low:.4g} to {high:.4g} {unit.name}"
    more: Figure = {"width": 0.5, "marker": {"color": KINDS[one.kind].colour}}
    bar = _bars(KINDS[one.kind], [middle], [float(row)], [text], [tip], **more)
    spread = Figure(array=[_round(high - middle)], arrayminus=[_round(middle - low)])
    look = Figure(type="data", symmetric=False, color=TEXT, thickness=1.4, width=7)
    return bar | {"error_x": spread | look, "insidetextanchor": "start"}


def _iterations(one: TimedTraining, row: int, unit: TimeUnit) -> Figure:
    """A dot below the bar for each iteration."""
    return Figure(
        type="scatter",
        mode="markers",
        x=[_round(value * unit.scale) for value in one.seconds],
        y=[row + 0.36] * len(one.seconds),
        marker={"color": KINDS[one.kind].colour, "size": 5, "opacity": 0.6},
        hoverinfo="x",
        showlegend=False,
    )


def _timeline_bars(swatch: Swatch, bars: Sequence[Bar], unit: TimeUnit) -> Figure:
    tips = [list(map(escape, bar.tip)) for bar in bars]
    line = {"color": PAPER, "width": [0.7 if bar.wide else 0 for bar in bars]}
    return _bars(
        swatch,
        [bar.length * unit.scale for bar in bars],
        [_round(bar.middle) for bar in bars],
        [escape(bar.label) for bar in bars],
        ["<br>".join([f"<b>{head}</b>", *rest]) for head, *rest in tips],
        base=[_round(bar.start * unit.scale) for bar in bars],
        width=[_round(bar.height * 0.94) for bar in bars],
        marker={"color": swatch.colour, "line": line},
    )


def _breakdown_bars(part: str, runs: Sequence[RecordedRun], unit: TimeUnit) -> Figure:
    swatch, seconds = PALETTE[part], [run.parts[part] for run in runs]
    whole = [run.iteration or 1.0 for run in runs]
    shares = [100 * value / of for value, of in zip(seconds, whole, strict=True)]
    shapes, ink = ["/" if run.predicted else "" for run in runs], "rgba(255,255,255,0.55)"
    hatch = Figure(shape=shapes, fgcolor=ink, size=7, solidity=0.25, fillmode="overlay")
    line = {"color": PAPER, "width": 1}
    return _bars(
        swatch,
        [value * unit.scale for value in seconds],
        [float(place) for place in range(len(runs))],
        [f"{share:.0f} %" if share >= 3 else "" for share in shares],
        [
            f"<b>{swatch.name}</b><br>{unit(value)}, {share:.1f} % of an iteration"
            for value, share in zip(seconds, shares, strict=True)
        ],
        marker={"color": swatch.colour, "line": line, "pattern": hatch},
    )


def _comparison_bars(
    swatch: Swatch, seconds: Sequence[float], unit: TimeUnit, shift: float
) -> Figure:
    texts = [unit(value) for value in seconds]
    values = [value * unit.scale for value in seconds]
    tips = [f"{swatch.name}: {text}" for text in texts]
    places = [place - shift for place in range(len(seconds))]
    more: Figure = {"width": 0.38, "marker": {"color": swatch.colour}, "insidetextanchor": "start"}
    return _bars(swatch, values, places, texts, tips, **more)


def _bars(
    swatch: Swatch, x: list[float], y: list[float], text: list[str], tips: list[str], **more: Any
) -> Figure:
    """Horizontal bars of one kind, with text inside where it fits."""
    ink = {"color": swatch.ink, "size": 12}
    inside = Figure(textposition="inside", insidetextanchor="middle", insidetextfont=ink)
    texts = Figure(name=swatch.name, text=text, textangle=0, customdata=tips)
    bars = Figure(type="bar", orientation="h", x=[_round(value) for value in x], y=y)
    return bars | texts | inside | {"hovertemplate": "%{customdata}<extra></extra>"} | more


def _names(places: Sequence[tuple[str, float]], low: float, high: float) -> Figure:
    """A vertical axis of names, without zoom."""
    names = [escape(name).replace("\n", "<br>") for name, _ in places]
    ticks = Figure(tickvals=[place for _, place in places], ticktext=names, ticks="outside")
    plain = Figure(tickcolor="rgba(0,0,0,0)", fixedrange=True, showgrid=False, zeroline=False)
    return Figure(range=[low, high], automargin=True) | ticks | plain


def _rows(names: Sequence[str]) -> Figure:
    """A vertical axis with a name for each bar, the first on top."""
    return _names([(name, row) for row, name in enumerate(names)], len(names) - 0.5, -0.5)


def _axis(title: str, end: float) -> Figure:
    heading = {"text": title, "font": {"size": 12, "color": FAINT}, "standoff": 8}
    return Figure(title=heading, gridcolor=LINE, zeroline=False, tickformat=",~r", range=[0, end])


def _layout(
    height: int, barmode: str, x: Figure, y: Figure, right: int = 14, top: int = 6, **more: Any
) -> Figure:
    """Lay out a plot ``height`` pixels high, with margins on the right and at the top."""
    margin = {"l": 8, "r": right, "t": top, "b": 52}
    own = Figure(height=height, barmode=barmode, margin=margin, xaxis=x, yaxis=y)
    return LOOK | own | more


def _round(value: float) -> float:
    """Six significant digits: a smaller page, and still more than a screen shows."""
    return float(f"{value:.6g}")
