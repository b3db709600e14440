"""A bar chart of trainings that took turns, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from slipstream.report.alternation import TimedTraining

LOOKS = {
    "baseline": ("█", ""),
    "exact": ("█", "green"),
    "lossy": ("▒", "yellow"),
    "floor": ("░", "dim"),
}
"""What fills the bar of each kind, and its style: lossy ones differ without colours, too."""


def bar_chart(trainings: Sequence[TimedTraining], width: int) -> Text:
    """A row for each, filled up to the first quartile; from there a line to the third.

    ``┼`` marks the median. Rows are at most ``width`` columns wide.

    Example:
        >>> old = TimedTraining("old", "baseline", [0.8, 0.9, 1.0])
        >>> new = TimedTraining("new", "lossy", [0.4, 0.5, 0.6], "1.80x")
        >>> print(bar_chart([old, new], 40))
        old  ████████████████├┼┤  0.900 s
        new  ▒▒▒▒▒▒▒▒├┼┤          0.500 s  1.80x
    """
    names = max(len(one.name) for one in trainings) + 2
    after = [_after(one) for one in trainings]
    columns = width - names - max(map(len, after))
    scale = columns / max(one.quartiles[2] for one in trainings)
    rows = []
    for one, words in zip(trainings, after, strict=True):
        fill, style = LOOKS[one.kind]
        cells = (f"{_cells(one, fill, scale):<{columns}}", style)
        rows.append(Text.assemble(f"{one.name:<{names}}", cells, words))
    return Text("\n").join(rows)


def _cells(one: TimedTraining, fill: str, scale: float) -> str:
    low, middle, high = (max(round(value * scale) - 1, 0) for value in one.quartiles)
    line = ["─"] * (high - low + 1)
    line[0], line[-1] = "├", "┤"
    line[middle - low] = "┼"
    return fill * low + "".join(line)


def _after(one: TimedTraining) -> str:
    words = f"  {one.quartiles[1]:.3f} s"
    return f"{words}  {one.gain}" if one.gain else words
