"""``slipstream plan``: what each strategy would bring, here and on clusters that are not there yet.

Never trains: a trace and a measured cluster are all it takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.plan.memory import plan_memory
from slipstream.cli.plan.tables import curve, ranking, ranks
from slipstream.errors import ClusterError, StrategyError
from slipstream.planner.candidates import candidates, label
from slipstream.planner.comm_plan import Plan
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.ranking import (
    RATES,
    Point,
    Prediction,
    rank,
    traced_strategy,
    what_if,
)
from slipstream.planner.simulate import simulate
from slipstream.planner.workload import Workload
from slipstream.strategy import Strategy
from slipstream.strategy.yaml import SUFFIXES
from slipstream.testbed import parse_rate
from slipstream.trace import Trace, chrome

PREDICTED_STEPS = 3


def plan(
    trace: Annotated[
        Path | None, typer.Option(help="A trace of the training: .json or .json.gz.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="cluster.yaml of `slipstream doctor network`.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Another number of hosts.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each.")] = None,
    rate: Annotated[str | None, typer.Option(help="Other links: 300mbit, 25gbit ...")] = None,
    exact_only: Annotated[
        bool,
        typer.Option(
            "--exact-only/--allow-lossy",
            help="Only what leaves the mathematics as it is, or larger batches (accumulate), too.",
        ),
    ] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the best strategy: .yaml.")
    ] = None,
    predicted: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the trace that the best strategy would leave, for `slipstream report`.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers as JSON.")] = False,
    memory: Annotated[
        str | None, typer.Option(help="Of a rank's device: the largest batch that fits instead.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --memory: a known model, or FILE.py:FUNCTION.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="With --memory: tokens of a text, or pixels a side.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="With --memory: adamw (the default), sgd, momentum, lamb ...")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="With --memory: fp32; or bf16 or fp16, as precision half_weights computes."
        ),
    ] = None,
) -> None:
    """Predict what each strategy would bring, and rank them; or how large a batch may be.

    The cluster is the one that was measured, or, with --nodes, --ranks-per-node or --rate, another
    one: the numbers are then extrapolated, and say so.

    [dim]slipstream plan --trace trace.json --cluster cluster.yaml -o strategy.yaml[/dim]
    [dim]slipstream plan --trace trace.json --cluster cluster.yaml --nodes 64 --rate 25gbit[/dim]

    With --memory no trace is needed: the model is counted on shapes, without memory. FUNCTION
    returns it and a function that makes its arguments by name for a batch of so many samples.

    [dim]slipstream plan --memory 32GiB --model bert-large[/dim]
    [dim]slipstream plan --memory 80GB --model train.py:build --optimizer lamb --dtype bf16[/dim]
    """
    if memory is not None:
        _must_be_left_out(
            {
                "--trace": trace, "--cluster": cluster, "--nodes": nodes,
                "--ranks-per-node": ranks_per_node, "--rate": rate, "--output": output,
                "--predicted": predicted, "--allow-lossy": None if exact_only else True,
            },
            "--memory, which finds the largest batch and predicts no times",
        )  # fmt: skip
        plan_memory(memory, model, length, optimizer or "adamw", dtype or "fp32", as_json)
        return
    _must_be_left_out(
        {"--model": model, "--length": length, "--optimizer": optimizer, "--dtype": dtype},
        "--trace and --cluster, which predict times; give --memory, too, for the largest batch",
    )
    if trace is None or cluster is None:
        raise StrategyError(
            "plan needs --trace and --cluster, to predict times; or --memory and --model, to find "
            "the largest batch"
        )
    check_output(output)
    if predicted is not None:
        check_place("--predicted", predicted)
    bits = None if rate is None else float(parse_rate(rate))
    recorded = chrome.read(trace)
    base = traced_strategy(recorded)
    measured = NetworkProfile.load(cluster)
    if nodes is not None or ranks_per_node is not None:
        measured = _as_traced(measured, recorded)
    workload, here = prepare(recorded, measured)
    where = here
    if bits is not None and (nodes or here.hosts) == 1:
        raise ClusterError(
            f"--rate {rate}: all ranks are on one host, and use no link; give --nodes, too"
        )
    if any(option is not None for option in (nodes, ranks_per_node, rate)):
        where = here.scaled(nodes or here.hosts, ranks_per_node or here.ranks_per_host, bits)
        workload = workload.for_ranks(where.world_size)
    found = rank(candidates(workload, where, exact_only, base), workload, where, base)
    best = found[0].strategy
    by_nodes, by_rate = _elsewhere(best, workload, here, where, bits)
    if output is not None:
        write_strategy(best, output)
    if predicted is not None:
        future = simulate(
            workload, Plan.of(best, workload.gradients, where.codecs), where, steps=PREDICTED_STEPS
        )
        chrome.write(future, predicted)
    if as_json:
        typer.echo(json.dumps(_document(found, by_nodes, by_rate, where), indent=2))
        return
    console = Console()
    console.print(ranking(found, base, where))
    _print_beside(console, label(best), where, by_nodes, by_rate)
    if output is not None:
        console.print(Text(f"The best one is in {output}."), soft_wrap=True)


def _print_beside(
    console: Console,
    name: str,
    where: NetworkProfile,
    by_nodes: Sequence[Point],
    by_rate: Sequence[Point],
) -> None:
    """What to doubt, and curves of the best strategy on other clusters."""
    for doubt in where.doubts:
        console.print(Text(f"warning: {doubt}", style="yellow"))
    if where.extrapolated:
        console.print(Text(f"Extrapolated: {where.extrapolated}", style="yellow"))
    if by_nodes:
        title = f"{name}: more and fewer nodes, {ranks(where.ranks_per_host)} each"
        console.print(curve(title, by_nodes, "nodes"))
    if by_rate:
        title = f"{name}: other links, {ranks(where.world_size)}"
        console.print(curve(title, by_rate, "rate"))


def _must_be_left_out(options: Mapping[str, object], where: str) -> None:
    """Refuse options that say nothing there.

    Raises:
        StrategyError: names the option.
    """
    for option, value in options.items():
        if value is not None:
            raise StrategyError(f"{option} means nothing with {where}")


def _elsewhere(
    best: Strategy,
    workload: Workload,
    here: NetworkProfile,
    where: NetworkProfile,
    bits: float | None,
) -> tuple[list[Point], list[Point]]:
    """Predictions over nodes, and over rates; none where they would say nothing."""
    per_node = where.ranks_per_host
    if here.hosts * here.ranks_per_host != here.world_size:  # hosts of different size
        return [], []
    by_nodes = what_if(best, workload, here, ranks_per_node=per_node, rates=(bits,))
    if where.hosts == 1:  # there is no link
        return by_nodes, []
    nodes = (where.hosts,)
    return by_nodes, what_if(
        best, workload, here, nodes=nodes, ranks_per_node=per_node, rates=RATES
    )


def _as_traced(cluster: NetworkProfile, trace: Trace) -> NetworkProfile:
    """The cluster with as many ranks as the trace has: extrapolated, if it was measured on others.

    Only for those who ask for an extrapolation anyway; else another number is a mistake.
    """
    ranks = int(trace.meta.get("world_size", 1))
    if ranks in (1, cluster.world_size):
        return cluster
    hosts = len(set(trace.meta.get("hosts") or [""]))
    return cluster.scaled(hosts, ranks // hosts)


def check_output(output: Path | None) -> None:
    """Find out before the work that a strategy cannot be written there.

    Raises:
        StrategyError: another suffix, or no such folder.
    """
    if output is None:
        return
    if output.suffix.lower() not in SUFFIXES:
        raise StrategyError(
            f"--output {output}: a strategy file ends in {', '.join(SUFFIXES)}; rename it"
        )
    check_place("--output", output)


def check_place(option: str, file: Path) -> None:
    """Find out before the work that a file cannot be written.

    Raises:
        StrategyError: no such folder, or the file is a folder or may not be written.
    """
    place = file if file.exists() else file.parent
    if file.is_dir() or not os.access(place, os.W_OK):
        raise StrategyError(f"{option} {file}: cannot be written; choose another place")


def write_strategy(strategy: Strategy, output: Path) -> None:
    """As YAML or JSON, by the suffix."""
    is_json = output.suffix.lower() == ".json"
    output.write_text(strategy.to_json() if is_json else strategy.to_yaml())


def _document(
    found: Sequence[Prediction],
    by_nodes: Sequence[Point],
    by_rate: Sequence[Point],
    where: NetworkProfile,
) -> dict[str, Any]:
    """Everything that the tables show, and every strategy in full."""
    return {
        "world_size": where.world_size,
        "extrapolated": where.extrapolated,
        "strategies": [_row(one) for one in found],
        "nodes": [_point(point) for point in by_nodes],
        "rates": [_point(point) for point in by_rate],
    }


def _row(one: Prediction) -> dict[str, Any]:
    return {"name": label(one.strategy), **asdict(one), "strategy": one.strategy.document()}


def _point(point: Point) -> dict[str, Any]:
    one = point.prediction
    return {
        "nodes": point.nodes,
        "ranks": point.ranks,
        "rate": point.rate,
        "seconds": one.seconds,
        "samples_per_second": one.samples_per_second,
        "efficiency": one.efficiency,
    }
