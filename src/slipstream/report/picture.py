"""The timelines of the report as a PNG picture, for places without a browser.

Imports matplotlib only when it draws (it is optional), and never ``pyplot``: that needs a display.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from slipstream.report.bars import Bar, Drawing
from slipstream.report.palette import FAINT, LINE, PALETTE, PAPER, TEXT, chart_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _DPI = 12.0, 110
_ROW = 0.27
"""Height of a row in inches."""


def picture(drawings: Sequence[tuple[str, Drawing]]) -> bytes:
    """PNG data: the drawings, each under its title, on one scale of time."""
    from matplotlib.figure import Figure

    end = max(drawing.end for _, drawing in drawings) or 1e-6
    heights = [drawing.height * _ROW + 0.9 for _, drawing in drawings]
    size = (_WIDTH, sum(heights) + 0.4)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained", facecolor=PAPER)
    places = figure.subplots(len(drawings), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, drawing) in zip(places, drawings, strict=True):
        _draw(axes, drawing, end)
        _describe(axes, title, drawing)
    _add_key(figure, {bar.kind for _, drawing in drawings for bar in drawing.bars})
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Axes, drawing: Drawing, end: float) -> None:
    """The bars, with their labels where they fit."""
    from matplotlib.collections import PolyCollection

    unit = chart_unit(end)
    for kind, swatch in PALETTE.items():
        bars = [bar for bar in drawing.bars if bar.kind == kind]
        corners = [_corners(bar, unit.scale) for bar in bars]
        borders = [0.4 if bar.wide else 0.0 for bar in bars]
        axes.add_collection(
            PolyCollection(corners, facecolors=swatch.colour, edgecolors=PAPER, linewidths=borders)
        )
        centred: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": 8,
            "color": swatch.ink,
        }
        for bar in bars:
            if _fits(bar, end):
                middle = (bar.start + bar.length / 2) * unit.scale
                axes.text(middle, bar.middle, bar.label, **centred)
    axes.set_xlim(0, end * unit.scale * 1.005)
    axes.set_ylim(drawing.height + 0.1, -0.1)
    axes.set_xlabel(f"{unit.name} since the step began", color=FAINT, fontsize=9)


def _corners(bar: Bar, scale: float) -> list[tuple[float, float]]:
    left, right = bar.start * scale, (bar.start + bar.length) * scale
    half = bar.height * 0.94 / 2
    low, high = bar.middle - half, bar.middle + half
    return [(left, low), (left, high), (right, high), (right, low)]


def _fits(bar: Bar, end: float) -> bool:
    """Whether the label is shorter than the bar; a letter takes 0.08 inches."""
    room = bar.length / end * (_WIDTH - 1.5)
    return bool(bar.label) and bar.height >= 0.6 and len(bar.label) * 0.08 < room


def _describe(axes: Axes, title: str, drawing: Drawing) -> None:
    """Title, note and ranks, without a frame. ``$`` in text from a trace is no mathematics."""
    note = wrap(drawing.note, 150)
    bold: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "parse_math": False}
    axes.set_title(title, loc="left", pad=8 + 12 * len(note), color=TEXT, **bold)
    above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    look: dict[str, Any] = {"va": "bottom", "fontsize": 9, "color": FAINT}
    axes.annotate("\n".join(note), (0, 1), (0, 4), **above, **look)
    labels, places = zip(*drawing.ranks, strict=True)
    axes.set_yticks(places, labels, fontsize=9, parse_math=False)
    axes.tick_params(length=0, labelcolor=TEXT)
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _add_key(figure: Figure, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    swatches = [swatch for kind, swatch in PALETTE.items() if kind in kinds]
    patches = [Patch(color=swatch.colour, label=swatch.name) for swatch in swatches]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=9
        )
