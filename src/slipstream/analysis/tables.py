"""The tables of ``summary``: 80 columns wide, the numbers that decide first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from slipstream.analysis.breakdown import TypicalExchange, TypicalIteration
from slipstream.analysis.compact_table import compact
from slipstream.analysis.operators import TypicalOperator
from slipstream.analysis.stages import TypicalStages
from slipstream.analysis.stragglers import Straggler
from slipstream.analysis.time_unit import TimeUnit
from slipstream.trace.event import exchange_order

PARTS = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed exchange",
    "optimizer": "optimizer",
    "other": "other",
    "iteration": "iteration",
    "tail": "tail",
}
"""The rows of the table of parts: field of ``Parts`` and label."""

_MOST_STRAGGLERS = 8


def parts_table(typical: TypicalIteration) -> Table:
    """A row for each part of an iteration: mean, share, and spread over ranks."""
    whole = typical.spread("iteration")
    unit = TimeUnit.of(whole.high)
    table = _table(
        "Where an iteration goes",
        ("part", f"mean {unit.name}", "share %", f"min .. max rank {unit.name}", "slowest"),
        "Means over the middle half of the iterations, by how long they took, so that the parts "
        "add up. Exposed exchange: an exchange runs and forward and backward do not. Other: "
        "nothing recorded runs. Tail: from the end of backward to the end of the last exchange; it "
        "overlaps the rows above.",
        labels=1,
    )
    for part, label in PARTS.items():
        over = typical.spread(part)
        middle, low, high = map(unit.number, (over.mean, over.low, over.high))
        slowest = f"rank {over.slowest}" if low != high else "-"
        share, is_whole = _percent(over.mean, whole.mean), part == "iteration"
        if is_whole:
            table.add_section()
        style = "bold" if is_whole else None
        table.add_row(label, middle, share, f"{low} .. {high}", slowest, style=style)
    return table


def rank_table(typical: TypicalIteration) -> Table:
    """A row for each rank: the whole iteration, then its parts."""
    unit = TimeUnit.of(typical.spread("iteration").high)
    parts = ["iteration", *(part for part in PARTS if part != "iteration")]
    headings = ("rank", *(PARTS[part].replace(" ", "\n") for part in parts))
    caption = f"Means over the middle half of the iterations, in {unit.name}."
    rows = [
        (rank, *(unit.number(getattr(numbers, part)) for part in parts))
        for rank, numbers in typical.ranks.items()
    ]
    return _table("Rank by rank", headings, caption, rows)


def straggler_table(stragglers: Sequence[Straggler]) -> Table:
    """A row for each straggler, up to 8, the worst first."""
    unit = TimeUnit.of(max(s.usual + s.seconds for s in stragglers))
    rows = [
        (
            PARTS[s.phase],
            s.rank,
            *map(unit.number, (s.seconds, s.usual)),
            f"{s.iterations} of {s.of}",
        )
        for s in stragglers[:_MOST_STRAGGLERS]
    ]
    return _table(
        "Ranks slower than the others",
        ("phase", "rank", f"slower by {unit.name}", f"others {unit.name}", "iterations"),
        "Slower in most iterations than the median of the other ranks, by more than 5 % of it and "
        "1 % of an iteration. The worst come first.",
        rows,
        labels=1,
    )


def exchange_table(exchanges: Sequence[TypicalExchange]) -> Table:
    """A row for each exchange: what it costs, when it runs, what it sends."""
    unit = TimeUnit.of(max(max(abs(e.start) + e.duration, e.skew) for e in exchanges))
    times = [f"{name}\n{unit.name}" for name in ("time", "start", "skew")]
    what = "module" if any(e.module for e in exchanges) else "gradients"
    rows = []
    for e in exchanges:
        number = e.name if e.module else exchange_order(e.name) or e.name
        hidden = _percent(e.hidden, e.duration)
        numbers = map(unit.number, (e.duration, e.start, e.skew))
        speed = f"{e.bytes * 8e-9 / e.duration:.2f}" if e.duration else "-"
        exposed, size = unit.number(e.exposed), f"{e.bytes / 1e6:.2f}"
        rows.append(
            (number, exposed, hidden, *numbers, size, speed, e.module or e.gradients or "-")
        )
    return _table(
        "Exchanges between ranks",
        ("#", f"exposed\n{unit.name}", "hidden\n%", *times, "MB", "Gbit/s", what),
        "Exposed: the time without forward or backward beside it. Hidden: the share beside them. "
        "Start: since the start of the iteration. Skew: how long the first rank waits for the "
        "last to be ready. Gbit/s: bytes / time.",
        rows,
    )


def stage_table(ranks: Sequence[TypicalStages]) -> Table:
    """A row for each rank of a pipeline: its bubble, and what it computes."""
    unit = TimeUnit.of(max(s.forward + s.backward + s.waits for s in ranks))
    times = [f"{name}\n{unit.name}" for name in ("waits", "forward", "backward")]
    rows = []
    for s in ranks:
        numbers = map(unit.number, (s.waits, s.forward, s.backward))
        stages = ", ".join(map(str, s.stages))
        rows.append((s.rank, f"{100 * s.bubble:.1f}", *numbers, s.micro_batches, stages))
    return _table(
        "Stages of the pipeline",
        ("rank", "bubble\n%", *times, "micro-\nbatches", "stages"),
        "Bubble: the share of the time from the first forward to the last backward in which a rank "
        "computes nothing.",
        rows,
    )


def operator_table(operators: Sequence[TypicalOperator]) -> Table:
    """A row for each operator of ``slipstream.comm``, the longest first."""
    unit = TimeUnit.of(max(o.seconds for o in operators))
    rows = [
        (o.name, unit.number(o.seconds), f"{o.bytes / 1e6:.2f}", o.calls, o.ranks)
        for o in operators
    ]
    return _table(
        "Operators between ranks",
        ("operator", unit.name, "MB", "calls", "ranks"),
        "Sums of one iteration, with the wait for the other ranks; they are part of forward and "
        "backward. Ranks: size of the group.",
        rows,
        labels=1,
    )


def _table(
    title: str,
    headings: Sequence[str],
    caption: str,
    rows: Iterable[Sequence[object]] = (),
    labels: int = 0,
) -> Table:
    """A table; the first ``labels`` columns hold words, the others numbers."""
    table = compact(title, *headings, left=headings[:labels], caption=caption)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
