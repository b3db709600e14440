"""``slipstream plan --ranks``: each technique on more and more ranks, as tables and a chart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from string import ascii_letters
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.cli.plan.tables import ranks
from slipstream.errors import StrategyError
from slipstream.planner.forecast import Forecast
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.scale_out.growth import Growth, GrowthPoint, Placement, grow
from slipstream.planner.scale_out.shape import FabricConfig, FabricFileConfig, ScaleOutConfig
from slipstream.planner.scale_out.transformer import profile, workload
from slipstream.planner.search.ranking import MARGIN
from slipstream.strategy import Strategy
from slipstream.testbed import parse_rate
from slipstream.trace import chrome

MOST = 2**16
"""Ranks that are predicted at most."""
CHART_LINES = 12
COLUMN = 8
"""Characters of a number of ranks in the chart."""


def plan_growth(
    named: str | None,
    shape: Path | None,
    *,
    trace: Path | None,
    cluster: Path | None,
    ranks_per_node: int | None,
    rate: str | None,
    lossy: bool,
    as_json: bool,
) -> None:
    """Predict, and print JSON or tables.

    Raises:
        StrategyError: an option is missing, has a wrong value or no effect.
        ClusterError: the ranks asked for cannot be predicted.
    """
    if named is None:
        raise StrategyError("--shape needs --ranks, the numbers to predict for: --ranks 64..4096")
    numbers = rank_numbers(named)
    if (trace is None) != (cluster is None):
        raise StrategyError("--trace and --cluster go together: give both, or --shape instead")
    if trace is None or cluster is None:
        if shape is None:
            raise StrategyError(
                "--ranks needs --trace and --cluster, or --shape with model, batch and machine"
            )
        if (ranks_per_node, rate) != (None, None):
            raise StrategyError(
                "--ranks-per-node and --rate have no effect with --shape alone: set "
                "machine.ranks_per_host and machine.host_gbytes in the file"
            )
        growth = shape_growth(ScaleOutConfig.load(shape), numbers, lossy=lossy)
        kept = ""
    else:
        fabric = FabricConfig() if shape is None else FabricFileConfig.load(shape).fabric
        recorded, measured = chrome.read(trace), NetworkProfile.load(cluster)
        each = ranks_per_node or measured.ranks_per_host
        forecast = Forecast.elsewhere(recorded, measured, ranks_per_node=each)
        bits = None if rate is None else float(parse_rate(rate))
        where: dict[str, Any] = {"ranks_per_node": ranks_per_node, "rate": bits}
        growth = forecast.over_ranks(numbers, **where, fabric=fabric, lossy=lossy)
        kept = "Each rank keeps its batch: an update of twice the ranks has twice the samples. "
    if as_json:
        typer.echo(json.dumps(document(growth), indent=2))
        return
    show(growth, kept)


def rank_numbers(words: str) -> list[int]:
    """Read numbers of ranks: ``64..4096`` doubles, ``64,512`` lists.

    Raises:
        StrategyError: they are no such numbers.

    Example:
        >>> rank_numbers("64..500"), rank_numbers("64,96")
        ([64, 128, 256], [64, 96])
    """
    allowed = "allowed: 64..4096, which doubles from the first to the second, or a list: 64,96,512"
    first, dots, last = words.partition("..")
    try:
        found = [int(word) for word in ((first, last) if dots else words.split(","))]
    except ValueError:
        raise StrategyError(f"--ranks {words}: not whole numbers; {allowed}") from None
    if not all(1 <= number <= MOST for number in found):
        raise StrategyError(f"--ranks {words}: numbers must be from 1 to {MOST}; {allowed}")
    if not dots:
        return sorted(set(found))
    if found[0] > found[1]:
        raise StrategyError(f"--ranks {words}: the first must be the smaller one; {allowed}")
    doubled = (found[0] * 2**power for power in range(MOST.bit_length()))
    return list(takewhile(lambda number: number <= found[1], doubled))


def shape_growth(shape: ScaleOutConfig, numbers: Sequence[int], *, lossy: bool) -> Growth:
    """Predict a training by its shape; DDP with buckets of 25 MB is the base.

    Raises:
        StrategyError: the ranks, or the batch, cannot be divided so.
    """

    def place(count: int) -> Placement:
        return Placement(workload(shape, count), profile(shape, count))

    return grow(place, numbers, Strategy.load("ddp"), shape.fabric, lossy=lossy)


def document(growth: Growth) -> dict[str, Any]:
    """The numbers of all tables, with every strategy in full."""
    return {
        "base": growth.base,
        "points": [
            {**asdict(point), "strategy": point.strategy.document()} for point in growth.points
        ],
        "chosen": [
            {"ranks": point.ranks, "technique": point.technique} for point in growth.chosen()
        ],
        "takeovers": [one._asdict() for one in growth.takeovers()],
        "notes": list(growth.notes),
    }


def show(growth: Growth, kept: str = "") -> None:
    """Print the curve, where another technique takes over, and the cost."""
    console = Console()
    console.print(_table(growth))
    console.print(Text("\n".join(chart(growth))), soft_wrap=True)
    console.print()
    for one in growth.takeovers():
        times = f", {one.times:.2f} times as fast as the one before" if one.times > 1 else ""
        console.print(Text(f"From {ranks(one.ranks)} on: {one.technique}{times}."))
    if not growth.takeovers():
        console.print(Text(f"{growth.base} stays: nothing else is {MARGIN:.0%} faster."))
    console.print("", _costs(growth))
    for note in growth.notes:
        console.print(Text(f"The network: {note}", style="yellow"), soft_wrap=True)
    console.print(Text(f"{kept}Extrapolated from what was measured or given; nothing was run."))


def _table(growth: Growth) -> Table:
    numbers, letters = growth.numbers, _letters(growth)
    usual = growth.points[0].exactness
    table = compact(
        f"Speed-up over {growth.base} on {ranks(numbers[0])}",
        *("", "technique", *map(str, numbers)),
        left=["technique"],
        caption="In samples a second. Bold: the one to choose; another one is chosen where it is "
        f"predicted to be {MARGIN:.0%} faster. Exactness, unless a line says otherwise: {usual}",
    )
    chosen = {point.ranks: point.technique for point in growth.chosen()}
    for technique in growth.techniques:
        cells = []
        for number in numbers:
            point = growth.at(number).get(technique)
            style = "bold" if chosen[number] == technique else ""
            cells.append(Text(f"{point.speed_up:.3g}x" if point else "-", style=style))
        exactness = next(one.exactness for one in growth.points if one.technique == technique)
        ends = "" if exactness == usual else f" ({exactness})"
        table.add_row(letters[technique], technique + ends, *cells)
    return table


def chart(growth: Growth) -> Iterator[str]:
    """Draw the share of a linear speed-up of each technique over the numbers of ranks.

    A letter stands for a technique; where several meet, for the fastest.
    """
    numbers, letters = growth.numbers, _letters(growth)
    most = max(_share(point, numbers[0]) for point in growth.points)
    marks: dict[tuple[int, int], str] = {}
    for point in sorted(growth.points, key=lambda point: point.seconds):
        line = round(_share(point, numbers[0]) / most * CHART_LINES)
        marks.setdefault((line, numbers.index(point.ranks)), letters[point.technique])
    for line in range(CHART_LINES, -1, -1):
        cells = (marks.get((line, column), " ") for column in range(len(numbers)))
        row = "".join(cell.rjust(COLUMN) for cell in cells)
        yield f"{line / CHART_LINES * most:5.0%} |{row}".rstrip()
    yield "      +" + "-" * COLUMN * len(numbers)
    yield "ranks  " + "".join(str(number).rjust(COLUMN) for number in numbers)


def _share(point: GrowthPoint, fewest: int) -> float:
    """The part of a speed-up that grows as the ranks do."""
    return point.speed_up * fewest / point.ranks


def _letters(growth: Growth) -> dict[str, str]:
    return dict(zip(growth.techniques, ascii_letters, strict=False))


def _costs(growth: Growth) -> Table:
    table = compact(
        "The one to choose, and its cost",
        *("ranks", "update", "linear", "rank hours per 1,000 updates", "technique"),
        left=["technique"],
    )
    for point in growth.chosen():
        table.add_row(
            str(point.ranks),
            f"{point.seconds:.4g} s",
            f"{_share(point, growth.numbers[0]):.0%}",
            f"{point.rank_hours:,.1f}",
            point.technique,
        )
    return table
