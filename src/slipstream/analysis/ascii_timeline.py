"""Draws one iteration as rows of letters, so that a plain terminal shows what overlaps what.

Never computes a statistic.
"""

from __future__ import annotations

from rich.text import Text

from slipstream.trace.event import (
    BACKWARD,
    BUFFERS,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    Event,
    exchange_order,
)
from slipstream.trace.intervals import lanes
from slipstream.trace.timeline import Iteration

_LETTERS = {DATA_WAIT: "d", FORWARD: "f", BACKWARD: "b", OPTIMIZER: "o"}
_STYLES = {"d": "red", "f": "green", "b": "cyan", "o": "magenta"}
_LEGEND = "d data wait, f forward, b backward, o optimizer, v buffers, 1-9 exchange"
_LABEL = 10


def strip(iteration: Iteration, width: int = 80) -> Text:
    """The iteration as a drawing ``width`` columns wide, time going right.

    The row ``compute`` shows letters, the row ``exchange`` the last digit of the segment's number
    (``v``: buffers); exchanges that overlap each other take further rows. Every span gets a column
    at least.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> [iteration] = timeline([
        ...     Event("iteration", 0, 2, 0.0, 1.0),
        ...     Event("forward", 0, 2, 0.0, 0.2),
        ...     Event("backward", 0, 2, 0.2, 0.6),
        ...     Event("allreduce1", 0, 2, 0.4, 0.8),
        ...     Event("optimizer", 0, 2, 0.8, 1.0),
        ... ])
        >>> print(strip(iteration, width=31))
        rank 0, step 2: 1000.00 ms
        compute  |ffffbbbbbbbb    oooo|
        exchange |        11111111    |
        d data wait, f forward, b backward, o optimizer, v buffers, 1-9 exchange
    """
    known = [event for event in iteration.events if event.name in _LETTERS]
    drawing = Text(f"rank {iteration.rank}, step {iteration.step}: {timing(iteration.duration)}\n")
    drawing.append_text(_row("compute", known, iteration, width))
    exchanges = iteration.exchanges
    placed = lanes([(event.start, event.end) for event in exchanges])
    for lane in range(max(placed, default=-1) + 1):
        inside = [event for event, at in zip(exchanges, placed, strict=True) if at == lane]
        drawing.append_text(_row("" if lane else "exchange", inside, iteration, width))
    return drawing.append(_LEGEND, style="dim")


def unit(largest: float) -> tuple[str, float, int]:
    """Name, factor and decimals of the unit for times up to ``largest`` seconds.

    Example:
        >>> unit(0.25)
        ('ms', 1000.0, 2)
    """
    if largest < 1e-3:
        return "us", 1e6, 1
    return ("ms", 1e3, 2) if largest < 10 else ("s", 1.0, 3)


def timing(seconds: float) -> str:
    """A time with the unit that fits it.

    Example:
        >>> timing(0.25), timing(12.0)
        ('250.00 ms', '12.000 s')
    """
    name, scale, digits = unit(seconds)
    return f"{seconds * scale:.{digits}f} {name}"


def _row(label: str, events: list[Event], iteration: Iteration, width: int) -> Text:
    """One row; where two spans share a column, the later one shows."""
    columns = width - _LABEL - 1
    scale = columns / iteration.duration if iteration.duration else 0.0
    cells = [" "] * columns
    for event in events:
        first = min(max(int((event.start - iteration.start) * scale + 0.5), 0), columns - 1)
        last = min(int((event.end - iteration.start) * scale + 0.5), columns)
        cells[first : max(last, first + 1)] = _letter(event) * max(last - first, 1)
    text = Text(f"{label:<{_LABEL - 1}}|")
    for cell in cells:
        text.append(cell, style=_STYLES.get(cell, "yellow"))
    return text.append("|\n")


def _letter(event: Event) -> str:
    order = exchange_order(event.name)
    if order is None:
        return _LETTERS[event.name]
    return "v" if event.name == BUFFERS else str(order % 10)
