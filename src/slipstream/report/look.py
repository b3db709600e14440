"""How every drawing of the report looks: one colour and one name for each kind of time.

Never draws. The colours are those of M. Okabe and K. Ito, "Color Universal Design" (2008): people
who are blind to some colours can tell them apart; inks are chosen for contrast on them.
"""

from __future__ import annotations

from dataclasses import dataclass

TEXT, FAINT, LINE, PAPER = "#1f2933", "#5b6770", "#d9dee3", "#ffffff"


@dataclass(frozen=True, slots=True)
class Look:
    """Name, colour, and the colour of text on it."""

    name: str
    colour: str
    ink: str = TEXT


LOOKS = {
    "data_wait": Look("data wait", "#e69f00"),
    "forward": Look("forward", "#56b4e9"),
    "backward": Look("backward", "#0072b2", PAPER),
    "hidden": Look("exchange, hidden", "#f6d3bd"),
    "exposed": Look("exchange, exposed", "#d55e00"),
    "optimizer": Look("optimizer", "#009e73"),
    "other": Look("other", "#c3c9cf"),
}
"""By kind of time; all but ``hidden`` are parts of an iteration, in the order of the bars."""

MEASURED, PREDICTED = Look("measured", "#44546a", PAPER), Look("predicted", "#b3bcc8")


@dataclass(frozen=True, slots=True)
class Unit:
    """How to write the times of one drawing, all alike.

    Example:
        >>> Unit.of(1.8)(0.0256), Unit.of(0.02).name
        ('26 ms', 'ms')
    """

    name: str
    scale: float
    digits: int

    @classmethod
    def of(cls, largest: float) -> Unit:
        """The unit for times up to ``largest`` seconds: three to four digits of it show."""
        if largest < 1e-3:
            return cls("us", 1e6, 1)
        if largest < 10:
            return cls("ms", 1e3, 2 if largest < 0.1 else 1 if largest < 1 else 0)
        return cls("s", 1.0, 2)

    def __call__(self, seconds: float) -> str:
        return f"{seconds * self.scale:,.{self.digits}f} {self.name}"


def shortened(text: str, most: int) -> str:
    """The text, its middle left out where it is longer than ``most``.

    Example:
        >>> shortened("features.28.weight", 12)
        'featur...ght'
    """
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"
