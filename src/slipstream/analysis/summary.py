"""Shows a trace in a terminal, or as JSON: speed, the parts of an iteration, each exchange.

The numbers come from the other modules of this room; here they get units and words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.analysis import tables
from slipstream.analysis.ascii_timeline import ascii_timeline
from slipstream.analysis.breakdown import TypicalIteration, typical_iteration
from slipstream.analysis.data import idle_share, queue
from slipstream.analysis.operators import typical_operators
from slipstream.analysis.stages import typical_stages
from slipstream.analysis.stragglers import stragglers
from slipstream.analysis.throughput import compute_share, samples_per_second, scaling_efficiency
from slipstream.errors import TraceError
from slipstream.trace.event import Trace
from slipstream.trace.timeline import Iteration, timeline

IDLE = 0.01
"""A smaller imbalance of ranks is not worth a word."""


def summary(
    trace: Trace, rank: int | None = None, *, per_rank: bool = False, baseline: Trace | None = None
) -> Group:
    """The numbers of a trace as text and tables that fit 80 columns.

    Args:
        trace: Of one run.
        rank: Show this rank alone; samples/s and scaling efficiency remain those of all ranks.
        per_rank: Add a table with a row for each rank.
        baseline: The same training on one rank: adds the scaling efficiency.

    Raises:
        TraceError: There is no iteration or not this rank, or the baseline has several ranks.

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
    typical = typical_iteration(iterations, rank)
    rates = _throughput(trace, iterations, baseline)
    words = [_headline(trace.meta, typical), _speed(typical, rates)]
    words += [data] if (data := _data(iterations)) is not None else []
    drawing = ascii_timeline(_example(iterations, typical))
    pieces: list[Table | Text] = [*words, drawing, tables.parts_table(typical)]
    if slow := stragglers(iterations, _clock_error(trace.meta)):
        pieces.append(tables.straggler_table(slow))
    if per_rank:
        pieces.append(tables.rank_table(typical))
    if typical.exchanges:
        pieces.append(tables.exchange_table(typical.exchanges))
    if stages := typical_stages(iterations, rank):
        pieces.append(tables.stage_table(stages))
    if operators := typical_operators(iterations, rank):
        pieces.append(tables.operator_table(operators))
    return Group(*(Padding(piece, (0, 0, 1, 0)) for piece in pieces))


def document(
    trace: Trace, rank: int | None = None, *, baseline: Trace | None = None
) -> dict[str, Any]:
    """The numbers of ``summary`` as plain JSON values, in seconds; null if unknown.

    Example:
        >>> from slipstream.trace.event import Event
        >>> numbers = document(Trace((Event("iteration", 0, 2, 0.0, 0.5),)))
        >>> numbers["iterations"], numbers["over_ranks"]["iteration"]["mean"]
        (1, 0.5)
    """
    iterations = timeline(trace.events)
    typical = typical_iteration(iterations, rank)
    slow, read = stragglers(iterations, _clock_error(trace.meta)), queue(iterations)
    return {
        "meta": trace.meta,
        "iterations": typical.iterations,
        "compute_share": compute_share(typical),
        **_throughput(trace, iterations, baseline),
        "queue": read and read._asdict(),
        "idle": idle_share(iterations),
        "ranks": {str(rank): asdict(parts) for rank, parts in typical.ranks.items()},
        "over_ranks": {part: typical.spread(part)._asdict() for part in tables.PARTS},
        "exchanges": [exchange._asdict() for exchange in typical.exchanges],
        "stages": [stages._asdict() for stages in typical_stages(iterations, rank)],
        "operators": [operator._asdict() for operator in typical_operators(iterations, rank)],
        "stragglers": [straggler._asdict() for straggler in slow],
    }


def strategy_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """A strategy in a few words: kinds without their fields, without nulls and what only watches
    (traces, checks).

    Example:
        >>> list(strategy_words({"gradients": {"split": {"kind": "single"}, "overlap": False}}))
        ['split single', 'no overlap']
        >>> list(strategy_words({"data": {"cache": None, "prefetch": {"workers": "auto"}}}))
        ['prefetch']
    """
    for name, value in settings.items():
        if name in ("trace", "checks") or value is None:
            continue
        if name == "parallel":
            yield from _parallel_words(value)
        elif name in ("compute", "data"):
            yield from (setting for setting, chosen in value.items() if chosen)
        elif isinstance(value, Mapping):
            yield from [f"{name} {value['kind']}"] if "kind" in value else strategy_words(value)
        elif isinstance(value, bool):
            yield name if value else f"no {name}"
        else:
            yield f"{name} {value}"


def _parallel_words(settings: Mapping[str, Any]) -> Iterator[str]:
    if tensor := settings.get("tensor"):
        yield f"{tensor['ranks']} tensor ranks"
    if pipeline := settings.get("pipeline"):
        ranks, parts = pipeline["ranks"], pipeline["micro_batches"]
        yield f"pipeline of {ranks} ranks, {pipeline['schedule']}, {parts} micro-batches"


def _throughput(
    trace: Trace, iterations: Sequence[Iteration], baseline: Trace | None
) -> dict[str, float | None]:
    """Samples a second of all ranks, of which a predicted trace holds some, and the efficiency
    against one rank.

    Raises:
        TraceError: the baseline is of another model.
    """
    rate, efficiency = samples_per_second(iterations), None
    if rate is not None:
        held = len({iteration.rank for iteration in iterations})
        rate *= int(trace.meta.get("world_size") or held) / held
    if baseline is not None:
        names = [run.meta.get("model") for run in (trace, baseline)]
        if None not in names and names[0] != names[1]:
            raise TraceError(
                f"the baseline is of the model {names[1]}, the trace of {names[0]}; record the "
                "same training on one rank: slipstream launch --nproc 1"
            )
        efficiency = scaling_efficiency(iterations, timeline(baseline.events))
    return {"samples_per_second": rate, "scaling_efficiency": efficiency}


def _speed(typical: TypicalIteration, throughput: Mapping[str, float | None]) -> Text:
    rate, efficiency = throughput["samples_per_second"], throughput["scaling_efficiency"]
    words = [] if rate is None else [f"{rate:.5g} samples/s"]
    words.append(f"{compute_share(typical):.1%} of an iteration is compute")
    if efficiency is not None:
        words.append(f"scaling efficiency {efficiency:.3f} (linear: 1)")
    return Text(" | ".join(words))


def _data(iterations: Sequence[Iteration]) -> Text | None:
    """Whether batches are there in time, and whether ranks compute for equally long."""
    words, read, idle = [], queue(iterations), idle_share(iterations)
    if read is not None:
        words.append(f"{_count(read.readers, 'reader')} beside the training")
        if read.ready is not None:
            words[-1] += f": {read.ready:g} batches ready, none in {read.empty:.0%} of the steps"
    if idle >= IDLE:
        words.append(f"ranks would wait {idle:.1%} of forward and backward for the slowest")
    return Text(" | ".join(words)) if words else None


def _headline(meta: Mapping[str, Any], typical: TypicalIteration) -> Text:
    """Model, ranks, hosts, iterations, strategy, what is fused, clock error, as far as known."""
    words = [str(meta["model"])] if "model" in meta else []
    held = len(typical.ranks)
    world = int(meta.get("world_size") or held)
    words.append((f"{held} of " if held < world else "") + _count(world, "rank"))
    if meta.get("hosts"):
        words[-1] += f" on {_count(len(set(meta['hosts'])), 'host')}"
    words.append(_count(typical.iterations, "iteration"))
    words += strategy_words(meta.get("strategy") or {})
    words += meta.get("compute") or []
    if error := _clock_error(meta):
        words.append(f"clocks within {error * 1e6:.0f} us")
    return Text(" | ".join(words), style="bold")


def _clock_error(meta: Mapping[str, Any]) -> float:
    """The most by which times of two ranks may be off."""
    return max(map(float, meta.get("clock_error") or [0.0]))


def _example(iterations: Sequence[Iteration], typical: TypicalIteration) -> Iteration:
    """The iteration of the first rank that is nearest to the median."""
    rank, parts = next(iter(typical.ranks.items()))
    of_rank = [iteration for iteration in iterations if iteration.rank == rank]
    return min(of_rank, key=lambda iteration: abs(iteration.duration - parts.iteration))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
