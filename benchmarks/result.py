"""A result as a person reads it: paragraphs and tables, for a terminal or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as DrawnTable

Entry = Mapping[str, Any]
"""What a file of results holds."""


@dataclass(frozen=True)
class Table:
    """Columns by heading, and rows of cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def markdown(self) -> str:
        """As GitHub draws it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

    def drawn(self) -> DrawnTable:
        """For a terminal: numbers to the right."""
        table = DrawnTable()
        for number, heading in enumerate(self.columns):
            cells = [str(row[number]) for row in self.rows]
            numeric = all(re.fullmatch(r"[-+]?\d.*|", cell) for cell in cells)
            table.add_column(heading, justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*(str(cell).replace("**", "") for cell in row))
        return table


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Attributes:
        title: with the day.
        parts: paragraphs of Markdown, and tables, in order.
    """

    title: str
    parts: Sequence[str | Table]

    @property
    def anchor(self) -> str:
        """What its heading is linked by, on GitHub."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def markdown(self) -> str:
        """A section of the page of results."""
        parts = (part if isinstance(part, str) else part.markdown for part in self.parts)
        return "\n\n".join([f"## {self.title}", *parts])

    def show(self) -> None:
        """Print it."""
        console = Console(width=150)
        console.print(self.title, style="bold", highlight=False)
        for part in self.parts:
            console.print(part if isinstance(part, str) else part.drawn(), highlight=False)


def measured_with(entry: Entry, words: str = "") -> str:
    """A paragraph that ends with what was measured, and how to measure it again."""
    torch = entry["versions"]["torch"]
    torch = f"{torch}, commit {entry['commit']}" if "commit" in entry else torch
    return f"{words} torch {torch}. `{shown(entry)}`".strip()


def shown(entry: Entry) -> str:
    """The command that measured it, its result where results are, whatever the folder was then."""
    return re.sub(r"--json \S*/", "--json benchmarks/results/", entry["command"])


def one_table(
    entry: Entry,
    title: str,
    words: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    between: Sequence[str] = (),
) -> Result:
    """Build the result that is a paragraph of `measured_with` and a table.

    Args:
        entry: what the file holds.
        title: without the day.
        words: of the paragraph.
        columns: of the table.
        rows: of the table.
        between: paragraphs before the table.
    """
    parts: list[str | Table] = [measured_with(entry, words), *between, Table(columns, rows)]
    return Result(f"{title}, {entry['date']}", parts)


def span(low: float, high: float, digits: int) -> str:
    """Two quartiles.

    Example:
        >>> span(1.0, 2.0, 1)
        '1.0..2.0'
    """
    return f"{low:.{digits}f}..{high:.{digits}f}"


def spread(quartiles: Iterable[float], digits: int) -> tuple[str, str]:
    """The median of three quartiles, and the two others.

    Example:
        >>> spread((1, 2, 3), 1)
        ('2.0', '1.0..3.0')
    """
    low, middle, high = quartiles
    return f"{middle:.{digits}f}", span(low, high, digits)


def mebibytes(num_bytes: float | None) -> str:
    """Without a fraction; empty where nothing was measured."""
    return f"{num_bytes / 2**20:.0f}" if num_bytes else ""


def yes(within: bool) -> str:
    """Whether a bar was held."""
    return "yes" if within else "**no**"
