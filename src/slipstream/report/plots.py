"""The plots of the report, as plotly figures in plain mappings.

Does not import plotly (the page does). Text from a trace is escaped: plotly interprets some HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from slipstream.analysis.time_unit import TimeUnit
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
from slipstream.report.runs import Comparison, Run

Figure = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_ROW = 27
"""Height of a row of the timeline in pixels."""


def timeline_plot(drawing: Drawing, end: float) -> Figure:
    """Bars over time, from 0 to ``end`` seconds; zooms along time only."""
    unit = chart_unit(end)
    data = [
        _timeline_bars(swatch, [bar for bar in drawing.bars if bar.kind == kind], unit)
        for kind, swatch in PALETTE.items()
        if any(bar.kind == kind for bar in drawing.bars)
    ]
    layout = _layout(
        height=round(drawing.height * _ROW + 64),
        barmode="overlay",
        margin={"l": 8, "r": 14, "t": 6, "b": 52},
        xaxis=_axis(f"{unit.name} since the step began", range=[0, end * unit.scale * 1.005]),
        yaxis=_names(drawing.ranks, [drawing.height + 0.1, -0.1]),
    )
    return {"data": data, "layout": layout}


def breakdown_plot(runs: Sequence[Run]) -> Figure:
    """One stacked bar for each run, with its whole iteration written after it."""
    longest = max(sum(run.parts.values()) for run in runs)
    unit = chart_unit(longest)
    totals = [
        {
            "x": sum(run.parts.values()) * unit.scale,
            "y": place,
            "text": f"<b>{unit(run.iteration)}</b>",
            "showarrow": False,
            "xanchor": "left",
            "xshift": 6,
        }
        for place, run in enumerate(runs)
    ]
    layout = _layout(
        height=46 * len(runs) + 70,
        barmode="stack",
        bargap=0.3,
        margin={"l": 8, "r": 84, "t": 6, "b": 52},
        xaxis=_axis(f"{unit.name} an iteration", range=[0, longest * unit.scale * 1.02]),
        yaxis=_rows([shortened(run.name, 24) + "\npredicted" * run.predicted for run in runs]),
        annotations=totals,
    )
    return {"data": [_breakdown_bars(part, runs, unit) for part in PARTS], "layout": layout}


def comparison_plot(comparisons: Sequence[Comparison]) -> Figure:
    """Predicted beside measured, each pair of bars under its name."""
    longest = max(max(one.predicted, one.measured + one.spread) for one in comparisons)
    unit = chart_unit(longest)
    spreads = [one.spread * unit.scale for one in comparisons]
    data = [
        _comparison_bars(PREDICTED, [one.predicted for one in comparisons], unit, 0.21),
        _comparison_bars(MEASURED, [one.measured for one in comparisons], unit, -0.21)
        | {"error_x": {"array": spreads, "color": TEXT, "thickness": 1.2, "visible": any(spreads)}},
    ]
    layout = _layout(
        height=56 * len(comparisons) + 92,
        barmode="overlay",
        margin={"l": 8, "r": 14, "t": 34, "b": 52},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        xaxis=_axis(f"{unit.name} an iteration", range=[0, longest * unit.scale * 1.04]),
        yaxis=_rows([shortened(one.name, 26) for one in comparisons]),
    )
    return {"data": data, "layout": layout}


def _timeline_bars(swatch: Swatch, bars: Sequence[Bar], unit: TimeUnit) -> Figure:
    tips = [list(map(escape, bar.tip)) for bar in bars]
    return _bars(
        swatch,
        x=[_round(bar.length * unit.scale) for bar in bars],
        y=[_round(bar.middle) for bar in bars],
        text=[escape(bar.label) for bar in bars],
        base=[_round(bar.start * unit.scale) for bar in bars],
        width=[_round(bar.height * 0.94) for bar in bars],
        marker={
            "color": swatch.colour,
            "line": {"color": PAPER, "width": [0.7 if bar.wide else 0 for bar in bars]},
        },
        customdata=["<br>".join([f"<b>{head}</b>", *rest]) for head, *rest in tips],
    )


def _breakdown_bars(part: str, runs: Sequence[Run], unit: TimeUnit) -> Figure:
    swatch = PALETTE[part]
    seconds = [run.parts[part] for run in runs]
    shares = [
        100 * value / run.iteration if run.iteration else 0.0
        for value, run in zip(seconds, runs, strict=True)
    ]
    return _bars(
        swatch,
        x=[_round(value * unit.scale) for value in seconds],
        y=list(range(len(runs))),
        text=[f"{share:.0f} %" if share >= 3 else "" for share in shares],
        marker={
            "color": swatch.colour,
            "line": {"color": PAPER, "width": 1},
            "pattern": {
                "shape": ["/" if run.predicted else "" for run in runs],
                "fgcolor": "rgba(255,255,255,0.55)",
                "size": 7,
                "solidity": 0.25,
                "fillmode": "overlay",
            },
        },
        customdata=[
            f"<b>{swatch.name}</b><br>{unit(value)}, {share:.1f} % of an iteration"
            for value, share in zip(seconds, shares, strict=True)
        ],
    )


def _comparison_bars(
    swatch: Swatch, seconds: Sequence[float], unit: TimeUnit, shift: float
) -> Figure:
    return _bars(
        swatch,
        x=[_round(value * unit.scale) for value in seconds],
        y=[place - shift for place in range(len(seconds))],
        text=[unit(value) for value in seconds],
        width=0.38,
        marker={"color": swatch.colour},
        customdata=[f"{swatch.name}: {unit(value)}" for value in seconds],
        insidetextanchor="start",
    )


def _bars(swatch: Swatch, **more: Any) -> Figure:
    """Horizontal bars of one kind, with text inside where it fits."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": swatch.name,
        "hovertemplate": "%{customdata}<extra></extra>",
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": swatch.ink, "size": 12},
        **more,
    }


def _names(places: Sequence[tuple[str, float]], extent: Sequence[float]) -> Figure:
    """A vertical axis of names, without zoom."""
    return {
        "range": extent,
        "tickvals": [place for _, place in places],
        "ticktext": [escape(name).replace("\n", "<br>") for name, _ in places],
        "ticks": "outside",
        "tickcolor": "rgba(0,0,0,0)",
        "automargin": True,
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
    }


def _rows(names: Sequence[str]) -> Figure:
    """A vertical axis with a name for each bar, the first on top."""
    places = [(name, float(row)) for row, name in enumerate(names)]
    return _names(places, [len(names) - 0.5, -0.5])


def _axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "font": {"size": 12, "color": FAINT}, "standoff": 8},
        "gridcolor": LINE,
        "zeroline": False,
        "tickformat": ",~r",
        **more,
    }


def _layout(**more: Any) -> Figure:
    return {
        "autosize": True,
        "showlegend": False,
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": FONT, "size": 13, "color": TEXT},
        "uniformtext": {"mode": "hide", "minsize": 9},
        "hoverlabel": {"align": "left", "bgcolor": PAPER, "bordercolor": FAINT},
        "hovermode": "closest",
        "dragmode": "zoom",
        **more,
    }


def _round(value: float) -> float:
    """Six significant digits: a smaller page, and still more than a screen shows."""
    return float(f"{value:.6g}")
