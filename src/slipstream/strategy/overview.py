"""The overview table of a strategy: each setting, its value, its exactness, its meaning.

What a setting became on a model and its ranks is passed in as rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.strategy.setting import Setting, Variant, first_line


class Row(NamedTuple):
    """One row of the overview."""

    setting: str
    value: str
    note: str
    exactness: str = ""
    changed: bool = False  # differs from the default


def overview(strategy: Setting, resolved: Sequence[Row] = ()) -> Table:
    """The overview table of a strategy, for any rich console.

    Settings that differ from the default carry an asterisk; groups that are off take one line.

    Args:
        strategy: the configuration.
        resolved: what the settings became on this model and these ranks; drawn below a line.

    Example:
        >>> from slipstream.strategy import Strategy
        >>> happened = Row("gradients.split", "161 gradients -> 6 all-reduces", "as observed")
        >>> table = plain_text(overview(Strategy(), [happened]), width=160)
        >>> "161 gradients -> 6 all-reduces" in table
        True
    """
    rows = list(_rows(strategy))
    table = Table(title=type(strategy).__name__, title_justify="left", caption_justify="left")
    if any(row.changed for row in rows):
        table.caption = "* differs from the default"
    for heading in ("setting", "value", "exactness", "note"):
        table.add_column(heading, no_wrap=heading in ("setting", "exactness"))
    for row in (*rows, *resolved):
        # Text objects: rich would read a folder called "[red]" as markup.
        cells = (row.setting + (" *" if row.changed else ""), row.value, row.exactness, row.note)
        style = "bold" if row.changed else None
        table.add_row(*map(Text, cells), style=style, end_section=row is rows[-1])
    return table


def summary(strategy: Setting, resolved: Sequence[Row]) -> Table:
    """List what was asked for beyond the defaults, and what became of it: a line or two each.

    Args:
        strategy: the configuration.
        resolved: what the settings became on this model and these ranks.

    Example:
        >>> from slipstream.strategy import Strategy
        >>> row = Row("fused", "161 gradients -> 6 exchanges", "in ready order")
        >>> print(plain_text(summary(Strategy.load("ddp"), [row])))
        strategy
          gradients.split  by_bytes (reordered)
        here
          fused            161 gradients -> 6 exchanges, in ready order
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    changed = [row for row in _rows(strategy) if row.changed]
    table.add_row("strategy", "" if changed else "the defaults")
    for row in changed:
        value = row.value.partition(" (")[0]
        table.add_row(f"  {row.setting}", Text(_noted(value, row.exactness)))
    if resolved:
        table.add_row("here", "")
    for row in resolved:
        note = f", {row.note}" if row.note else ""
        table.add_row(f"  {row.setting}", Text(_noted(f"{row.value}{note}", row.exactness)))
    return table


def _noted(words: str, exactness: str) -> str:
    return f"{words} ({exactness})" if exactness else words


def plain_text(table: Table, width: int | None = None) -> str:
    """The table as text without colours, at most ``width`` columns wide; None: as the terminal."""
    width = get_terminal_size().columns if width is None else width
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def _rows(setting: Setting, prefix: str = "") -> Iterator[Row]:
    """One row per leaf or variant, in field order."""
    for name, info in type(setting).model_fields.items():
        value, path = getattr(setting, name), prefix + name
        changed = value != info.default
        if isinstance(value, Variant):
            yield Row(path, _shown(value), first_line(value.__doc__), value.exactness, changed)
        elif isinstance(value, Setting) and value.active:
            yield from _rows(value, f"{path}.")
        elif isinstance(value, Setting):
            yield Row(path, "off", first_line(value.__doc__), changed=changed)
        else:
            yield Row(path, _shown(value), first_line(info.description), changed=changed)


def _shown(value: object) -> str:
    """A value on one line, as in YAML; variants, rules and lists may be nested."""
    if isinstance(value, Variant):
        settings = [f"{name} {_shown(inner)}" for name, inner in value if name != "kind"]
        return f"{value.kind} ({', '.join(settings)})" if settings else value.kind
    if isinstance(value, Setting):
        return ": ".join(_shown(inner) for _, inner in value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    if value is None:
        return "off"
    return str(value).lower() if isinstance(value, bool) else str(value)
