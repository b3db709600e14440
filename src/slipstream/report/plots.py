"""The plots of the report as plotly figures in plain mappings.

Never imports plotly: the page does. Text that a trace brings is escaped, for plotly reads a little
HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from slipstream.report.bars import Bar, Drawing
from slipstream.report.look import (
    FAINT,
    LINE,
    LOOKS,
    MEASURED,
    PAPER,
    PREDICTED,
    TEXT,
    Look,
    Unit,
    shortened,
)

Figure = dict[str, Any]
PARTS = tuple(kind for kind in LOOKS if kind != "hidden")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_ROW = 27
"""Pixels that a row of the timeline is high."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts of an iteration, in seconds; one bar."""

    name: str
    parts: Mapping[str, float]
    iteration: float
    predicted: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds an iteration: what was predicted, what was measured, and how far that spreads."""

    name: str
    predicted: float
    measured: float
    spread: float = 0.0

    @property
    def error(self) -> float:
        """By how much the prediction is too long, as a share of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def timeline_plot(drawing: Drawing, end: float) -> Figure:
    """Bars over time, from 0 to ``end`` seconds; zooms along time only."""
    unit = Unit.of(end)
    kinds = [kind for kind in LOOKS if any(bar.kind == kind for bar in drawing.bars)]
    data = [
        _timeline_bars(LOOKS[kind], [bar for bar in drawing.bars if bar.kind == kind], unit)
        for kind in kinds
    ]
    height = drawing.height * _ROW + 64
    layout = _layout(
        height=round(height),
        barmode="overlay",
        margin={"l": 8, "r": 14, "t": 6, "b": 52},
        xaxis=_axis(f"{unit.name} since the step began", range=[0, end * unit.scale * 1.005]),
        yaxis=_names(drawing.ranks, [drawing.height + 0.1, -0.1]),
    )
    return {"data": data, "layout": layout}


def breakdown_plot(stacks: Sequence[Stack]) -> Figure:
    """One stacked bar for each trace, its whole iteration written behind it."""
    longest = max(sum(stack.parts.values()) for stack in stacks)
    unit = Unit.of(longest)
    data = [_breakdown_bars(part, stacks, unit) for part in PARTS]
    totals = [
        {
            "x": sum(stack.parts.values()) * unit.scale,
            "y": place,
            "text": f"<b>{unit(stack.iteration)}</b>",
            "showarrow": False,
            "xanchor": "left",
            "xshift": 6,
        }
        for place, stack in enumerate(stacks)
    ]
    layout = _layout(
        height=46 * len(stacks) + 70,
        barmode="stack",
        bargap=0.3,
        margin={"l": 8, "r": 84, "t": 6, "b": 52},
        xaxis=_axis(f"{unit.name} an iteration", range=[0, longest * unit.scale * 1.02]),
        yaxis=_rows([_bar_name(stack) for stack in stacks]),
        annotations=totals,
    )
    return {"data": data, "layout": layout}


def compared_plot(compared: Sequence[Compared]) -> Figure:
    """Predicted beside measured, each pair of bars under its name."""
    longest = max(max(one.predicted, one.measured + one.spread) for one in compared)
    unit = Unit.of(longest)
    spreads = [one.spread * unit.scale for one in compared]
    data = [
        _compared_bars(PREDICTED, [one.predicted for one in compared], unit, 0.21),
        _compared_bars(MEASURED, [one.measured for one in compared], unit, -0.21)
        | {"error_x": {"array": spreads, "color": TEXT, "thickness": 1.2, "visible": any(spreads)}},
    ]
    layout = _layout(
        height=56 * len(compared) + 92,
        barmode="overlay",
        margin={"l": 8, "r": 14, "t": 34, "b": 52},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        xaxis=_axis(f"{unit.name} an iteration", range=[0, longest * unit.scale * 1.04]),
        yaxis=_rows([shortened(one.name, 26) for one in compared]),
    )
    return {"data": data, "layout": layout}


def _timeline_bars(look: Look, bars: Sequence[Bar], unit: Unit) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": look.name,
        "base": [_round(bar.start * unit.scale) for bar in bars],
        "x": [_round(bar.length * unit.scale) for bar in bars],
        "y": [_round(bar.middle) for bar in bars],
        "width": [_round(bar.height * 0.94) for bar in bars],
        "marker": {
            "color": look.colour,
            "line": {"color": PAPER, "width": [0.7 if bar.wide else 0 for bar in bars]},
        },
        "text": [escape(bar.label) for bar in bars],
        "customdata": [_tip(bar.tip) for bar in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
        **_inside(look),
    }


def _breakdown_bars(part: str, stacks: Sequence[Stack], unit: Unit) -> Figure:
    look = LOOKS[part]
    seconds = [stack.parts[part] for stack in stacks]
    shares = [
        100 * s / stack.iteration if stack.iteration else 0.0
        for s, stack in zip(seconds, stacks, strict=True)
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": look.name,
        "x": [_round(value * unit.scale) for value in seconds],
        "y": list(range(len(stacks))),
        "marker": {
            "color": look.colour,
            "line": {"color": PAPER, "width": 1},
            "pattern": {
                "shape": ["/" if stack.predicted else "" for stack in stacks],
                "fgcolor": "rgba(255,255,255,0.55)",
                "size": 7,
                "solidity": 0.25,
                "fillmode": "overlay",
            },
        },
        "text": [f"{share:.0f} %" if share >= 3 else "" for share in shares],
        "customdata": [
            f"<b>{look.name}</b><br>{unit(value)}, {share:.1f} % of an iteration"
            for value, share in zip(seconds, shares, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
        **_inside(look),
    }


def _compared_bars(look: Look, seconds: Sequence[float], unit: Unit, shift: float) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": look.name,
        "x": [_round(value * unit.scale) for value in seconds],
        "y": [place - shift for place in range(len(seconds))],
        "width": 0.38,
        "marker": {"color": look.colour},
        "text": [unit(value) for value in seconds],
        "hovertemplate": f"{look.name}: %{{text}}<extra></extra>",
        **_inside(look),
        "insidetextanchor": "start",
    }


def _inside(look: Look) -> Figure:
    """Text in bars, lying, where it fits."""
    return {
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": look.ink, "size": 12},
    }


def _bar_name(stack: Stack) -> str:
    return shortened(stack.name, 24) + "\npredicted" * stack.predicted


def _names(places: Sequence[tuple[str, float]], extent: Sequence[float]) -> Figure:
    """A vertical axis of names; it does not zoom."""
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


def _tip(lines: Sequence[str]) -> str:
    head, *rest = map(escape, lines)
    return "<br>".join([f"<b>{head}</b>", *rest])


def _round(value: float) -> float:
    """Six significant digits: less to load, and more than a screen shows."""
    return float(f"{value:.6g}")
