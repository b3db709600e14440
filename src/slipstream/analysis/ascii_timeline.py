"""Draws one iteration as rows of letters, to show in a terminal what overlaps what."""

from __future__ import annotations

from rich.text import Text

from slipstream.analysis.time_unit import format_seconds
from slipstream.trace.event import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    Event,
    exchange_order,
    is_meeting,
)
from slipstream.trace.intervals import lanes
from slipstream.trace.timeline import Iteration

_LETTERS = {DATA_WAIT: "d", FORWARD: "f", BACKWARD: "b", OPTIMIZER: "o"}
_STYLES = {"d": "red", "f": "green", "b": "cyan", "o": "magenta"}
_LEGEND = "d data wait, f forward, b backward, o optimizer, v buffers, 1-9 exchange"
_MEETINGS = ", m meeting"
_LABEL = 10


def ascii_timeline(iteration: Iteration, width: int = 80) -> Text:
    """The iteration as a drawing ``width`` columns wide, with time from left to right.

    The row ``compute`` shows letters, the row ``exchange`` the last digit of the segment's number
    (``v``: buffers, ``m``: a meeting). Exchanges that overlap each other take further rows. Every
    span gets at least one column.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> [iteration] = timeline([
        ...     Event("iteration", 0, 2, 0.0, 0.5),
        ...     Event("forward", 0, 2, 0.0, 0.1),
        ...     Event("backward", 0, 2, 0.1, 0.3),
        ...     Event("allreduce1", 0, 2, 0.2, 0.4),
        ...     Event("optimizer", 0, 2, 0.4, 0.5),
        ... ])
        >>> print(ascii_timeline(iteration, width=31))
        rank 0, step 2: 500.00 ms
        compute  |ffffbbbbbbbb    oooo|
        exchange |        11111111    |
        d data wait, f forward, b backward, o optimizer, v buffers, 1-9 exchange
    """
    drawing = Text(f"rank {iteration.rank}, step {iteration.step}: ")
    drawing.append(f"{format_seconds(iteration.duration)}\n")
    compute = [event for event in iteration.events if event.name in _LETTERS]
    drawing.append_text(_row("compute", compute, iteration, width))
    exchanges = (*iteration.exchanges, *iteration.meetings)
    lane_of = lanes([(event.start, event.end) for event in exchanges])
    for lane in range(max(lane_of, default=-1) + 1):
        in_lane = [event for event, at in zip(exchanges, lane_of, strict=True) if at == lane]
        drawing.append_text(_row("" if lane else "exchange", in_lane, iteration, width))
    return drawing.append(_LEGEND + _MEETINGS * bool(iteration.meetings), style="dim")


def _row(label: str, events: list[Event], iteration: Iteration, width: int) -> Text:
    """One row; where two spans share a column, the later one shows."""
    columns = width - _LABEL - 1
    scale = columns / iteration.duration if iteration.duration else 0.0
    cells = [" "] * columns
    for event in events:
        first = min(max(int((event.start - iteration.start) * scale + 0.5), 0), columns - 1)
        last = min(int((event.end - iteration.start) * scale + 0.5), columns)
        cells[first : max(last, first + 1)] = _letter(event.name) * max(last - first, 1)
    text = Text(f"{label:<{_LABEL - 1}}|")
    for cell in cells:
        text.append(cell, style=_STYLES.get(cell, "yellow"))
    return text.append("|\n")


def _letter(name: str) -> str:
    if is_meeting(name):
        return "m"
    order = exchange_order(name)
    if order is None:
        return _LETTERS[name]
    return str(order % 10) if order else "v"
