"""``slipstream plan``: predict strategies, here and on other clusters, from a trace.

Needs no training: a trace and a measured network are enough.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.options import AsJson, ExactOnly, Updates, check_writable
from slipstream.cli.plan import options
from slipstream.cli.plan.memory import Estimated, Speed, plan_memory
from slipstream.cli.plan.tables import besides, curve, ranking, ranks
from slipstream.errors import ClusterError, StrategyError
from slipstream.planner.beside import Beside, beside
from slipstream.planner.candidates import candidates, label
from slipstream.planner.comm_plan import CommPlan
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.ranking import (
    RATES,
    Prediction,
    ScaleOutPoint,
    rank,
    speed,
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
    trace: options.TraceFile = None,
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    ranks_per_node: options.PredictedRanksPerNode = None,
    rate: options.Rate = None,
    exact_only: ExactOnly = True,
    updates: Updates = None,
    output: options.Output = None,
    predicted: options.Predicted = None,
    as_json: AsJson = False,
    memory: options.MemoryOption = None,
    model: options.Model = None,
    length: options.Length = None,
    optimizer: options.Optimizer = None,
    dtype: options.Dtype = None,
) -> None:
    """Predict and rank strategies, or find the largest batch that fits.

    Predictions are for the measured cluster or, with --nodes, --ranks-per-node or --rate, for
    another one; those are extrapolated, and marked so.

    [dim]slipstream plan --trace trace.json --cluster cluster.yaml -o strategy.yaml[/dim]
    [dim]slipstream plan --trace trace.json --cluster cluster.yaml --nodes 64 --rate 25gbit[/dim]

    --memory needs no trace: it estimates a model from shapes, without allocating it. FUNCTION
    returns the model and a function from a batch size to the model's arguments by name. With
    --trace and --cluster of the same model it also says how fast each batch would be.

    [dim]slipstream plan --memory 32GiB --model bert-large[/dim]
    [dim]slipstream plan --memory 80GB --model train.py:build --optimizer lamb --dtype bf16[/dim]
    """
    recorded: dict[str, Any] = {"trace": trace, "cluster": cluster}
    elsewhere: dict[str, Any] = {"nodes": nodes, "ranks_per_node": ranks_per_node, "rate": rate}
    elsewhere |= {"updates": updates}
    files = {"output": output, "predicted": predicted}
    if memory is not None:
        context = "--memory, which finds the largest batch"
        _refuse(context, **elsewhere, **files, allow_lossy=not exact_only or None)
        estimated = Estimated(memory, model, length, optimizer or "adamw", dtype or "fp32")
        plan_memory(estimated, _speed(**recorded), as_json)
        return
    context = "--trace and --cluster, which predict times; add --memory to find the largest batch"
    _refuse(context, model=model, length=length, optimizer=optimizer, dtype=dtype)
    check_writable("--output", output, SUFFIXES)
    check_writable("--predicted", predicted)
    forecast = _forecast(**recorded, **elsewhere, exact_only=exact_only)
    _deliver(forecast, output, predicted, as_json)


def _speed(trace: Path | None, cluster: Path | None) -> Speed | None:
    """From a batch and what is recomputed to samples a second; None: no trace to tell from.

    Raises:
        StrategyError: one file without the other, or a trace in which activations were recomputed.
    """
    if trace is None and cluster is None:
        return None
    if trace is None or cluster is None:
        raise StrategyError("--trace and --cluster go together: give both, or neither")
    recorded = chrome.read(trace)
    base = traced_strategy(recorded)
    if base.memory.recompute is not None:
        raise StrategyError(
            f"--trace {trace}: activations were recomputed in it; record one with memory.recompute "
            "null"
        )
    return partial(speed, base, *prepare(recorded, NetworkProfile.load(cluster)))


@dataclass(frozen=True)
class _Forecast:
    """Predictions of all strategies on ``network``, and of the best one on others."""

    base: Strategy
    predictions: list[Prediction]
    workload: Workload
    network: NetworkProfile
    by_nodes: list[ScaleOutPoint]
    by_rate: list[ScaleOutPoint]
    beside: list[Beside]
    unpredicted: tuple[str, ...]

    @property
    def best(self) -> Strategy:
        return self.predictions[0].strategy

    def trace(self) -> Trace:
        """What the best strategy would leave."""
        exchange = CommPlan.of(self.best, self.workload.gradients, self.network.codecs)
        return simulate(self.workload, exchange, self.network, steps=PREDICTED_STEPS)

    def document(self) -> dict[str, Any]:
        """The numbers of all tables, with every strategy in full."""
        return {
            "world_size": self.network.world_size,
            "extrapolated": self.network.extrapolated,
            "strategies": [
                {"name": label(p.strategy), **asdict(p), "strategy": p.strategy.document()}
                for p in self.predictions
            ],
            "nodes": [_point(point) for point in self.by_nodes],
            "rates": [_point(point) for point in self.by_rate],
            "beside": [one._asdict() for one in self.beside],
            "unpredicted": list(self.unpredicted),
        }


def _forecast(
    trace: Path | None,
    cluster: Path | None,
    nodes: int | None,
    ranks_per_node: int | None,
    rate: str | None,
    updates: int | None,
    exact_only: bool,
) -> _Forecast:
    """Read what was recorded and measured, and predict.

    Raises:
        StrategyError: a file is not given.
        ClusterError: the cluster asked for cannot be predicted.
    """
    if trace is None or cluster is None:
        raise StrategyError(
            "plan needs --trace and --cluster, to predict times; or --memory and --model, to find "
            "the largest batch"
        )
    bits = None if rate is None else float(parse_rate(rate))
    recorded = chrome.read(trace)
    base = traced_strategy(recorded)
    measured = NetworkProfile.load(cluster)
    if nodes or ranks_per_node:
        measured = _as_traced(measured, recorded)
    workload, here = prepare(recorded, measured)
    if bits is not None and (nodes or here.hosts) == 1:
        raise ClusterError(
            f"--rate {rate}: all ranks are on one host, and use no link; give --nodes, too"
        )
    target = here
    if nodes or ranks_per_node or rate:
        target = here.scaled(nodes or here.hosts, ranks_per_node or here.ranks_per_host, bits)
        workload = workload.for_ranks(target.world_size)
    strategies = candidates(workload, target, exact_only, base)
    predictions = rank(strategies, workload, target, base, updates)
    curves = _curves(predictions[0].strategy, workload, here, target, bits)
    others = beside(recorded, workload, target, predictions[0], base, updates)
    return _Forecast(base, predictions, workload, target, *curves, *others)


def _deliver(
    forecast: _Forecast, output: Path | None, predicted: Path | None, as_json: bool
) -> None:
    """Write the files that were asked for, and print JSON or tables."""
    if output is not None:
        write_strategy(forecast.best, output)
    if predicted is not None:
        chrome.write(forecast.trace(), predicted)
    if as_json:
        typer.echo(json.dumps(forecast.document(), indent=2))
        return
    console = Console()
    _print(forecast, console)
    if output is not None:
        console.print(Text(f"The best strategy is in {output}."), soft_wrap=True)


def _print(forecast: _Forecast, console: Console) -> None:
    """The tables, and what is uncertain about them."""
    network = forecast.network
    console.print(ranking(forecast.predictions, forecast.base, network))
    if words := besides(forecast.beside, forecast.unpredicted, forecast.predictions[0]):
        console.print(words)
    for doubt in network.doubts:
        console.print(Text(f"warning: {doubt}", style="yellow"))
    if network.extrapolated:
        console.print(Text(f"Extrapolated: {network.extrapolated}", style="yellow"))
    more = f"more and fewer nodes, {ranks(network.ranks_per_host)} each"
    others = f"other links, {ranks(network.world_size)}"
    for title, points, over in (
        (more, forecast.by_nodes, "nodes"),
        (others, forecast.by_rate, "rate"),
    ):
        if points:
            console.print("", curve(f"{label(forecast.best)}: {title}", points, over))


def _refuse(context: str, **options: object) -> None:
    """Refuse options that have no effect.

    Raises:
        StrategyError: names the option.
    """
    for name, value in options.items():
        if value is not None:
            raise StrategyError(f"--{name.replace('_', '-')} has no effect with {context}")


def _curves(
    best: Strategy,
    workload: Workload,
    here: NetworkProfile,
    target: NetworkProfile,
    bits: float | None,
) -> tuple[list[ScaleOutPoint], list[ScaleOutPoint]]:
    """Predictions of the best strategy over nodes and over rates; empty where not possible."""
    if here.hosts * here.ranks_per_host != here.world_size:  # hosts of different size
        return [], []
    per_node = target.ranks_per_host
    by_nodes = what_if(best, workload, here, ranks_per_node=per_node, rates=(bits,))
    if target.hosts == 1:  # there is no link whose rate could change
        return by_nodes, []
    nodes = (target.hosts,)
    by_rate = what_if(best, workload, here, nodes=nodes, ranks_per_node=per_node, rates=RATES)
    return by_nodes, by_rate


def _as_traced(network: NetworkProfile, trace: Trace) -> NetworkProfile:
    """The network with as many ranks as the trace has, extrapolated if it was measured on others.

    Only where an extrapolation was asked for; otherwise a different number is a mistake.
    """
    ranks = int(trace.meta.get("world_size", 1))
    if ranks in (1, network.world_size):
        return network
    hosts = len(set(trace.meta.get("hosts") or [""]))
    return network.scaled(hosts, ranks // hosts)


def write_strategy(strategy: Strategy, output: Path) -> None:
    """Write YAML or JSON, by the suffix."""
    is_json = output.suffix.lower() == ".json"
    output.write_text(strategy.to_json() if is_json else strategy.to_yaml())


def _point(point: ScaleOutPoint) -> dict[str, Any]:
    where = {"nodes": point.nodes, "ranks": point.ranks, "rate": point.rate}
    names = ("seconds", "samples_per_second", "efficiency")
    return where | {name: getattr(point.prediction, name) for name in names}
