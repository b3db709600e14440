"""Draws a trace for a terminal: where an iteration goes, each exchange, and a strip of both.

Never computes a statistic: ``breakdown`` does; this chooses units and words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.analysis.ascii_timeline import strip, unit
from slipstream.analysis.breakdown import Typical, TypicalExchange, typical
from slipstream.analysis.operators import TypicalOperator, typical_operators
from slipstream.analysis.stages import TypicalStages, typical_stages
from slipstream.analysis.stragglers import Straggler, stragglers
from slipstream.analysis.throughput import compute_share, samples_per_second, scaling_efficiency
from slipstream.trace.event import Trace, exchange_order
from slipstream.trace.timeline import Iteration, timeline

_PARTS = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed exchange",
    "optimizer": "optimizer",
    "other": "other",
    "iteration": "iteration",
    "tail": "tail",
}
_MEANING = (
    "All numbers are medians over iterations. Exposed exchange: an exchange runs and forward and "
    "backward do not. Other: idle, nothing recorded runs. Tail: from the end of backward to the "
    "end of the last exchange; it overlaps the rows above."
)
_STRAGGLER_MEANING = (
    "In most iterations slower than the median of the other ranks by more than 5 % of it and 1 % "
    "of an iteration. The worst come first."
)
_MOST_STRAGGLERS = 8
_EXCHANGE_MEANING = (
    "Start counts from the start of the iteration. Hidden: the share that runs beside forward or "
    "backward. Skew: how long the first rank waits for the last to be ready. Gbit/s: bytes / time."
)
_STAGE_MEANING = (
    "bubble: the share of the time from the first forward to the last backward in which a rank "
    "computes nothing"
)
_OPERATOR_MEANING = (
    "Sums of one iteration, with the wait for the other ranks; it is a part of forward and "
    "backward. Ranks: how many the group has."
)


def summary(
    trace: Trace,
    rank: int | None = None,
    *,
    per_rank: bool = False,
    baseline: Trace | None = None,
) -> Group:
    """What a person wants to know of a trace, as tables 80 columns wide.

    Args:
        trace: Events and what they were measured on.
        rank: Only this rank; the speed and its efficiency are those of all ranks.
        per_rank: A table with a row for each rank, too.
        baseline: The same training on one rank, against which to show the scaling efficiency.

    Raises:
        TraceError: There is no iteration, not this rank, or a baseline that is none.

    Example:
        >>> from rich.console import Console
        >>> from slipstream.trace.event import Event
        >>> trace = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("forward", 0, 2, 0.0, 0.4)))
        >>> console = Console(width=80)
        >>> with console.capture() as shown:
        ...     console.print(summary(trace))
        >>> "80.0" in shown.get()
        True
    """
    iterations = timeline(trace.events)
    middle = typical(iterations, rank)
    pieces: list[Table | Text] = [
        _headline(trace.meta, middle),
        strip(_example(iterations, middle)),
        _speed(middle, _throughput(iterations, baseline)),
        _parts_table(middle),
    ]
    if slow := stragglers(iterations, _clock_error(trace.meta)):
        pieces.append(_straggler_table(slow))
    if per_rank:
        pieces.append(_rank_table(middle))
    if middle.exchanges:
        pieces.append(_exchange_table(middle.exchanges))
    if stages := typical_stages(iterations, rank):
        pieces.append(_stage_table(stages))
    if operators := typical_operators(iterations, rank):
        pieces.append(_operator_table(operators))
    return Group(*(Padding(piece, (0, 0, 1, 0)) for piece in pieces))


def document(
    trace: Trace, rank: int | None = None, *, baseline: Trace | None = None
) -> dict[str, Any]:
    """The numbers of ``summary`` as plain JSON values, in seconds; null where one is not known.

    Example:
        >>> from slipstream.trace.event import Event
        >>> numbers = document(Trace((Event("iteration", 0, 2, 0.0, 0.5),)))
        >>> numbers["iterations"], numbers["over_ranks"]["iteration"]["median"]
        (1, 0.5)
    """
    iterations = timeline(trace.events)
    middle = typical(iterations, rank)
    slow = stragglers(iterations, _clock_error(trace.meta))
    return {
        "meta": trace.meta,
        "iterations": middle.iterations,
        "compute_share": compute_share(middle),
        **_throughput(iterations, baseline),
        "ranks": {str(rank): asdict(parts) for rank, parts in middle.ranks.items()},
        "over_ranks": {part: asdict(middle.spread(part)) for part in _PARTS},
        "exchanges": [asdict(exchange) for exchange in middle.exchanges],
        "stages": [asdict(stages) for stages in typical_stages(iterations, rank)],
        "operators": [asdict(operator) for operator in typical_operators(iterations, rank)],
        "stragglers": [asdict(straggler) for straggler in slow],
    }


def _throughput(iterations: Sequence[Iteration], baseline: Trace | None) -> dict[str, float | None]:
    """Of all ranks: samples a second, and the efficiency against one rank."""
    one = None if baseline is None else timeline(baseline.events)
    return {
        "samples_per_second": samples_per_second(iterations),
        "scaling_efficiency": None if one is None else scaling_efficiency(iterations, one),
    }


def _speed(middle: Typical, throughput: Mapping[str, float | None]) -> Text:
    """Speed, and how much of the time is spent on what training is about."""
    rate, efficiency = throughput["samples_per_second"], throughput["scaling_efficiency"]
    words = [] if rate is None else [f"{rate:.5g} samples/s"]
    words.append(f"{compute_share(middle):.1%} of an iteration is compute")
    if efficiency is not None:
        words.append(f"scaling efficiency {efficiency:.3f} (linear: 1)")
    return Text(" | ".join(words))


def _headline(meta: Mapping[str, Any], middle: Typical) -> Text:
    """Model, ranks, hosts, iterations, strategy and the trust in the clocks, as far as known."""
    words = [str(meta["model"])] if "model" in meta else []
    words.append(_count(len(middle.ranks), "rank"))
    if meta.get("hosts"):
        words[-1] += f" on {_count(len(set(meta['hosts'])), 'host')}"
    words.append(_count(middle.iterations, "iteration"))
    words += strategy_words(meta.get("strategy") or {})
    if error := _clock_error(meta):
        words.append(f"clocks within {error * 1e6:.0f} us")
    return Text(" | ".join(words), style="bold")


def _clock_error(meta: Mapping[str, Any]) -> float:
    """The most by which times of two ranks may be off."""
    return max(map(float, meta.get("clock_error") or [0.0]))


def _parallel_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Of ranks that share a model."""
    if tensor := settings.get("tensor"):
        yield f"{tensor['ranks']} tensor ranks"
    if pipeline := settings.get("pipeline"):
        ranks, parts = pipeline["ranks"], pipeline["micro_batches"]
        yield f"pipeline of {ranks} ranks, {pipeline['schedule']}, {parts} micro-batches"


def strategy_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """A strategy in few words: kinds without their fields, no trace settings, no nulls."""
    for name, value in settings.items():
        if name == "trace" or value is None:
            continue
        if name == "parallel":
            yield from _parallel_words(value)
            continue
        if isinstance(value, Mapping):
            yield from [f"{name} {value['kind']}"] if "kind" in value else strategy_words(value)
        elif isinstance(value, bool):
            yield name if value else f"no {name}"
        else:
            yield f"{name} {value}"


def _example(iterations: list[Iteration], middle: Typical) -> Iteration:
    """The iteration of the first rank that is nearest to the median."""
    rank, parts = next(iter(middle.ranks.items()))
    own = [iteration for iteration in iterations if iteration.rank == rank]
    return min(own, key=lambda iteration: abs(iteration.duration - parts.iteration))


def _parts_table(middle: Typical) -> Table:
    whole = middle.spread("iteration")
    name, scale, digits = unit(whole.high)
    table = _table("Where an iteration goes", _MEANING)
    table.add_column("part")
    for heading in (f"median {name}", "share %", f"min .. max rank {name}", "slowest"):
        table.add_column(heading, justify="right")
    for part, label in _PARTS.items():
        over = middle.spread(part)
        low, high = (f"{value * scale:.{digits}f}" for value in (over.low, over.high))
        if part == "iteration":
            table.add_section()
        table.add_row(
            label,
            f"{over.median * scale:.{digits}f}",
            _percent(over.median, whole.median),
            f"{low} .. {high}",
            f"rank {over.slowest}" if low != high else "-",
            style="bold" if part == "iteration" else None,
        )
    return table


def _rank_table(middle: Typical) -> Table:
    name, scale, digits = unit(middle.spread("iteration").high)
    table = _table("Rank by rank", f"Medians over iterations, in {name}.")
    for heading in ("rank", *_PARTS.values()):
        table.add_column(heading.removesuffix(" exchange"), justify="right")
    for rank, parts in middle.ranks.items():
        seconds = asdict(parts)
        table.add_row(str(rank), *(f"{seconds[part] * scale:.{digits}f}" for part in _PARTS))
    return table


def _straggler_table(slow: tuple[Straggler, ...]) -> Table:
    name, scale, digits = unit(max(s.usual + s.seconds for s in slow))
    table = _table("Ranks slower than the others", _STRAGGLER_MEANING)
    for heading in ("rank", "phase", f"others {name}", f"slower by {name}", "iterations"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for s in slow[:_MOST_STRAGGLERS]:
        usual, seconds = (f"{value * scale:.{digits}f}" for value in (s.usual, s.seconds))
        table.add_row(str(s.rank), _PARTS[s.phase], usual, seconds, f"{s.iterations} of {s.of}")
    return table


def _exchange_table(exchanges: tuple[TypicalExchange, ...]) -> Table:
    name, scale, digits = unit(max(e.start + e.duration for e in exchanges))
    table = _table("Exchanges between ranks", _EXCHANGE_MEANING)
    table.add_column("#")
    for heading in ("gradients", "MB", "start", "time", "hidden", "exposed", "skew", "Gbit/s"):
        below = {"hidden": "%", "gradients": "", "MB": "", "Gbit/s": ""}.get(heading, name)
        table.add_column(f"{heading}\n{below}", justify="right")
    for e in exchanges:
        start, time, exposed, skew = (
            f"{seconds * scale:.{digits}f}" for seconds in (e.start, e.duration, e.exposed, e.skew)
        )
        table.add_row(
            str(exchange_order(e.name) or e.name),
            str(e.gradients or "-"),
            f"{e.bytes / 1e6:.2f}",
            start,
            time,
            _percent(e.hidden, e.duration),
            exposed,
            skew,
            f"{e.bytes * 8e-9 / e.duration:.2f}" if e.duration else "-",
        )
    return table


def _stage_table(every: tuple[TypicalStages, ...]) -> Table:
    name, scale, digits = unit(max(s.forward + s.backward + s.waits for s in every))
    table = _table("Stages of the pipeline", _STAGE_MEANING)
    for heading in ("rank", "stages", "micro-\nbatches"):
        table.add_column(heading, justify="right")
    for heading in ("forward", "backward", "waits"):
        table.add_column(f"{heading}\n{name}", justify="right")
    table.add_column("bubble\n%", justify="right")
    for s in every:
        seconds = (f"{part * scale:.{digits}f}" for part in (s.forward, s.backward, s.waits))
        stages = ", ".join(map(str, s.stages))
        bubble = f"{100 * s.bubble:.1f}"
        table.add_row(str(s.rank), stages, str(s.micro_batches), *seconds, bubble)
    return table


def _operator_table(operators: tuple[TypicalOperator, ...]) -> Table:
    name, scale, digits = unit(max(o.seconds for o in operators))
    table = _table("Operators between ranks", _OPERATOR_MEANING)
    table.add_column("operator")
    for heading in ("ranks", "calls", "MB", name):
        table.add_column(heading, justify="right")
    for o in operators:
        seconds = f"{o.seconds * scale:.{digits}f}"
        table.add_row(o.name, str(o.ranks), str(o.calls), f"{o.bytes / 1e6:.2f}", seconds)
    return table


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
