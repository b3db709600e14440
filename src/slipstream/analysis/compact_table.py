"""The look of every table in a terminal: 80 columns wide, no heading cut."""

from __future__ import annotations

from collections.abc import Collection

from rich import box
from rich.table import Table


def compact(
    title: str, *headings: str, left: Collection[str] = (), caption: str | None = None
) -> Table:
    """A table without a frame: numbers to the right, and text in the columns named in ``left``.

    Numbers keep their width; where the terminal is narrow, text takes more lines.
    """
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.box, table.pad_edge, table.show_edge = box.SIMPLE_HEAD, False, False
    table.padding = (0, 1, 0, 0)
    for heading in headings:
        is_text = heading in left
        if is_text:
            table.add_column(heading, overflow="fold")  # a long path is not cut
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    return table
