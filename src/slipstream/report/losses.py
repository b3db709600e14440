"""The section of predicted losses over time: one line a strategy, with the band that holds 80 %."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from slipstream.planner.network.fit import Array
from slipstream.planner.progress.calibration import LossCalibration, mathematics
from slipstream.planner.progress.curve import binned
from slipstream.planner.progress.delay import BEGIN
from slipstream.planner.progress.time_to_loss import INTERVAL, LossForecast, Timed
from slipstream.planner.search.label import label
from slipstream.report import page
from slipstream.report.palette import FAINT, LINE
from slipstream.report.plots import FONT, LOOK, Figure

COLOURS = ("#44546a", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of M. Okabe and K. Ito, as all of the report; the first is the baseline's."""
BEYOND = 5.0
"""Times the calibration that is drawn."""
POINTS = 60
_UNITS = ((3600.0 * 2, 3600.0, "hours"), (60.0 * 2, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def losses(calibration: LossCalibration) -> str:
    """The section; empty where there is no calibration that tells a curve.

    Raises:
        TraceError: the losses of the first run tell no curve.
    """
    forecast = LossForecast(calibration)
    known = [one for one in forecast.timed() if forecast.source(one.strategy) is not None]
    shown = known[: len(COLOURS)]
    end = BEYOND * max(run.seconds * len(run.losses) for run in calibration.runs[: len(COLOURS)])
    rows = []
    for one in shown:
        low, middle, high = np.quantile(forecast.course(one, np.array([end]))[:, 0], INTERVAL)
        rows.append(
            [label(one.strategy), f"{one.seconds:.4g} s", f"{middle:.4g} ({low:.4g} to {high:.4g})"]
        )
    size, unit = _unit(end)
    remark = (
        f"Predicted from short runs of {len(calibration.runs[0].losses)} updates, whose losses are "
        f"the dots; a band holds 80 %. Drawn up to {BEYOND:.0f} times the longest of them."
    )
    figure = losses_plot(forecast, shown, end)
    headings = ["strategy", "an update", f"loss after {end / size:.3g} {unit}"]
    plot = page.plot("losses", figure, with_library=False)
    return page.section("losses", "Loss over time", remark, plot, page.table(headings, rows))


def losses_plot(forecast: LossForecast, shown: Sequence[Timed], end: float) -> Figure:
    """Lines and bands up to ``end`` seconds, and the measured losses as dots."""
    size, unit = _unit(end)
    data: list[Figure] = []
    for one, colour in zip(shown, COLOURS, strict=False):
        run = forecast.runs[mathematics(one.strategy)]
        seconds = np.geomspace(BEGIN * run.seconds * len(run.losses), end, POINTS)
        name = escape(label(one.strategy))
        low, middle, high = np.quantile(forecast.course(one, seconds), INTERVAL, axis=0)
        x = _rounded(seconds / size)
        band = {"x": [*x, *x[::-1]], "y": [*_rounded(high), *_rounded(low)[::-1]]}
        data.append(
            Figure(
                **band,
                type="scatter",
                fill="toself",
                fillcolor=_faded(colour),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
            )
        )
        data.append(
            Figure(
                x=x,
                y=_rounded(middle),
                type="scatter",
                mode="lines",
                name=name,
                legendgroup=name,
                line={"color": colour, "width": 2},
                hovertemplate=f"<b>{name}</b><br>%{{x:.3g}} {unit}: %{{y:.4g}}<extra></extra>",
            )
        )
        bins = binned(run.losses)
        data.append(
            Figure(
                x=_rounded(bins.updates * run.seconds / size),
                y=_rounded(bins.losses),
                type="scatter",
                mode="markers",
                marker={"color": colour, "size": 5},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    axis = {"gridcolor": LINE, "linecolor": FAINT, "zeroline": False}
    layout = Figure(
        **{**LOOK, "showlegend": True},
        height=420,
        margin={"l": 60, "r": 20, "t": 30, "b": 50},
        xaxis={**axis, "title": {"text": unit}, "range": [0, end / size]},
        yaxis={**axis, "title": {"text": "loss"}, "range": _visible(data)},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"family": FONT}},
    )
    return Figure(data=data, layout=layout)


def _visible(data: Sequence[Figure]) -> list[float]:
    """The range from the lowest band to the highest beginning of a line: the first drop, before it,
    would leave no room for what differs later."""
    high = max(y for one in data if one["mode"] == "lines" and "fill" not in one for y in one["y"])
    low = min(y for one in data for y in one["y"])
    room = 0.1 * (high - low)
    return [low - room, high + room]


def _unit(end: float) -> tuple[float, str]:
    return next((size, name) for least, size, name in _UNITS if end >= least)


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
