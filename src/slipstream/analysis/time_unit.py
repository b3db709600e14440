"""Chooses the unit in which times are written: us, ms or s."""

from __future__ import annotations

from typing import NamedTuple


class TimeUnit(NamedTuple):
    """The unit of all times of one table or chart."""

    name: str
    scale: float
    digits: int

    @classmethod
    def of(cls, largest: float) -> TimeUnit:
        """The unit for times up to ``largest`` seconds, with five digits: eight fit a row.

        Example:
            >>> TimeUnit.of(0.25).number(0.1)
            '100.00'
        """
        if largest < 1e-3:
            return cls("us", 1e6, 1)
        if largest < 10:
            return cls("ms", 1e3, 2 if largest < 1 else 1)
        return cls("s", 1.0, 3 if largest < 100 else 1)

    def number(self, seconds: float) -> str:
        """A cell of a table whose heading names the unit."""
        return f"{seconds * self.scale:.{self.digits}f}"

    def __call__(self, seconds: float) -> str:
        """The number with thousands separators and the unit's name.

        Example:
            >>> TimeUnit("ms", 1e3, 0)(1.8)
            '1,800 ms'
        """
        return f"{seconds * self.scale:,.{self.digits}f} {self.name}"


def format_seconds(seconds: float) -> str:
    """A time in the unit that fits it.

    Example:
        >>> format_seconds(0.25), format_seconds(12.0)
        ('250.00 ms', '12.000 s')
    """
    return TimeUnit.of(seconds)(seconds)
