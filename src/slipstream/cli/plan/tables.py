"""The tables of ``slipstream plan``: strategies, and one of them on other clusters.

Never predicts anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from slipstream.planner.candidates import TOLERANCE, label
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.ranking import Point, Prediction
from slipstream.strategy import Strategy
from slipstream.testbed import format_rate

SHOWN = 12
_MEANING = (
    "Predicted. Efficiency: the speed of all ranks over the sum of the speeds that they would have "
    "alone, without any exchange. Memory: gradients and their flags, on each rank. Of strategies "
    f"within {TOLERANCE:.1%} of each other the one with the fewest segments comes first. * the "
    "strategy of the trace."
)


def ranking(found: Sequence[Prediction], base: Strategy, where: NetworkProfile) -> Table:
    """The strategies, the fastest first; that of the trace is always among those shown."""
    per_node = f" on {where.hosts} hosts" if where.hosts > 1 else ""
    table = Table(
        title=f"{len(found)} strategies, {ranks(where.world_size)}{per_node}",
        caption=_MEANING,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("strategy")
    for heading in ("segments", "iteration", "samples/s", "efficiency", "memory"):
        table.add_column(heading, justify="right")
    table.add_column("exactness")
    for place, one in enumerate(found):
        is_base = one.strategy == base
        if place >= SHOWN and not is_base:
            continue
        table.add_row(
            Text(label(one.strategy) + (" *" if is_base else "")),
            str(one.segments),
            _seconds(one.seconds),
            _speed(one.samples_per_second),
            f"{one.efficiency:.1%}",
            f"{one.memory_bytes / 2**20:.1f} MB",
            one.exactness,
            style="bold" if is_base or place == 0 else None,
        )
    return table


def curve(title: str, points: Sequence[Point], over: str) -> Table:
    """One strategy on other clusters, with a bar of its efficiency."""
    table = Table(title=title, title_justify="left")
    for heading in (over, "ranks", "iteration", "samples/s", "efficiency"):
        table.add_column(heading, justify="right")
    table.add_column("", min_width=20)
    for point in points:
        one = point.prediction
        table.add_row(
            str(point.nodes) if over == "nodes" else format_rate(point.rate or 0),
            str(point.ranks),
            _seconds(one.seconds),
            _speed(one.samples_per_second),
            f"{one.efficiency:.1%}",
            Bar(1.0, 0.0, min(one.efficiency, 1.0), width=20),
        )
    return table


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _speed(samples_per_second: float) -> str:
    return f"{samples_per_second:.4g}" if samples_per_second else "-"


def ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
