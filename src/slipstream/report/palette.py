"""Colours and names of the parts of an iteration, and units, for all drawings of the report.

The colours are those of M. Okabe and K. Ito, "Color Universal Design" (2008), which people with
colour blindness can tell apart; the ink is chosen for contrast.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.analysis.time_unit import TimeUnit

TEXT, FAINT, LINE, PAPER = "#1f2933", "#5b6770", "#d9dee3", "#ffffff"


class Swatch(NamedTuple):
    """Name, colour, and the colour of text on it."""

    name: str
    colour: str
    ink: str = TEXT


PALETTE = {
    "data_wait": Swatch("data wait", "#e69f00"),
    "forward": Swatch("forward", "#56b4e9"),
    "backward": Swatch("backward", "#0072b2", PAPER),
    "hidden": Swatch("exchange, hidden", "#f6d3bd"),
    "exposed": Swatch("exchange, exposed", "#d55e00"),
    "optimizer": Swatch("optimizer", "#009e73"),
    "other": Swatch("other", "#c3c9cf"),
}
PARTS = tuple(kind for kind in PALETTE if kind != "hidden")
"""The parts that sum to an iteration, in the order of the bars."""

MEASURED, PREDICTED = Swatch("measured", "#44546a", PAPER), Swatch("predicted", "#b3bcc8")


def chart_unit(largest: float) -> TimeUnit:
    """The unit for a chart of times up to ``largest`` seconds, with three to four digits.

    Example:
        >>> chart_unit(1.8)(0.0256), chart_unit(0.02).name
        ('26 ms', 'ms')
    """
    of_milliseconds = 2 if largest < 0.1 else 1 if largest < 1 else 0
    unit = TimeUnit.of(largest)
    return unit._replace(digits={"us": 1, "ms": of_milliseconds, "s": 2}[unit.name])


def shortened(text: str, most: int) -> str:
    """The text without its middle if it is longer than ``most``.

    Example:
        >>> shortened("features.28.weight", 12)
        'featur...ght'
    """
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"
