"""``slipstream plan``: predict strategies, here and on other clusters, from a trace.

Needs no training: a trace and a measured network are enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.options import AsJson, ExactOnly, Updates, check_apart, check_writable
from slipstream.cli.plan import options
from slipstream.cli.plan.growth import plan_growth
from slipstream.cli.plan.losses import plan_losses, read_goal
from slipstream.cli.plan.memory import Estimated, Speed, plan_memory
from slipstream.cli.plan.tables import besides, curve, ranking, ranks, unsure
from slipstream.cli.strategy_file import write_strategy
from slipstream.errors import StrategyError
from slipstream.planner.forecast import Forecast
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import Prediction, ScaleOutPoint
from slipstream.planner.search.rare_meetings import RareMeetings
from slipstream.planner.search.unpredicted import Beside
from slipstream.strategy import Strategy
from slipstream.strategy.yaml import SUFFIXES
from slipstream.testbed import parse_rate
from slipstream.trace import chrome

PREDICTED_STEPS = 3


def plan(
    trace: options.TraceFile = None,
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    ranks_per_node: options.PredictedRanksPerNode = None,
    rate: options.Rate = None,
    ranks: options.RankNumbers = None,
    shape: options.ShapeFile = None,
    exact_only: ExactOnly = True,
    updates: Updates = None,
    output: options.Output = None,
    predicted: options.Predicted = None,
    as_json: AsJson = False,
    to_loss: options.ToLoss = None,
    for_time: options.ForTime = None,
    losses: options.Losses = None,
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

    --ranks draws how fast each technique is on more and more ranks, where another one takes over,
    and what that costs; --shape gives it a model and a machine instead of a trace.

    [dim]slipstream plan --trace trace.json --cluster cluster.yaml --ranks 64..4096[/dim]
    [dim]slipstream plan --shape shape.yaml --ranks 64,512,4096[/dim]

    --to-loss and --for ask for the whole training, not for an iteration: which strategy reaches a
    training loss first, or the lowest loss in a time. --losses are those of short runs.

    [dim]slipstream plan --trace t.json --cluster c.yaml --allow-lossy --to-loss 3.2 --losses
    losses.json[/dim]

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
    goal = {"to_loss": to_loss, "for": for_time, "losses": losses}
    if ranks is not None or shape is not None:
        context = "--ranks and --shape, which predict each technique on the ranks that they name"
        estimate = {"memory": memory, "model": model, "length": length}
        _refuse(context, nodes=nodes, updates=updates, **files, **goal, **estimate)
        _refuse(context, optimizer=optimizer, dtype=dtype)
        where: dict[str, Any] = {"ranks_per_node": ranks_per_node, "rate": rate}
        plan_growth(ranks, shape, **recorded, **where, lossy=not exact_only, as_json=as_json)
        return
    if memory is not None:
        context = "--memory, which finds the largest batch"
        _refuse(context, **elsewhere, **files, **goal, allow_lossy=not exact_only or None)
        estimated = Estimated(memory, model, length, optimizer or "adamw", dtype or "fp32")
        plan_memory(estimated, _speed(**recorded), as_json)
        return
    context = "--trace and --cluster, which predict times; add --memory to find the largest batch"
    _refuse(context, model=model, length=length, optimizer=optimizer, dtype=dtype)
    check_writable("--output", output, SUFFIXES)
    check_writable("--predicted", predicted)
    if predicted is not None:
        chrome.check_name(predicted)
    results = {"--output": output, "--predicted": predicted}
    check_apart(results, {"--trace": trace, "--cluster": cluster, "--losses": losses})
    known = read_goal(to_loss, for_time, losses, exact_only=exact_only)
    if known is not None:
        context = "--to-loss or --for: other ranks have another batch, so other losses"
        _refuse(context, nodes=nodes, ranks_per_node=ranks_per_node)
        _refuse("--to-loss or --for", predicted=predicted)
    forecast = _forecast(**recorded, **elsewhere)
    if known is not None:
        plan_losses(forecast, known, output=output, as_json=as_json)
        return
    _deliver(_Answer(forecast, exact_only), output, predicted, as_json)


def _speed(trace: Path | None, cluster: Path | None) -> Speed | None:
    """From a batch and what is recomputed to samples a second; None: no trace to tell from.

    Raises:
        StrategyError: one file without the other, or a trace in which activations were recomputed.
    """
    if trace is None and cluster is None:
        return None
    if trace is None or cluster is None:
        raise StrategyError("--trace and --cluster go together: give both, or neither")
    forecast = Forecast.elsewhere(chrome.read(trace), NetworkProfile.load(cluster))
    if forecast.base.memory.recompute is not None:
        raise StrategyError(
            f"--trace {trace}: activations were recomputed in it; record one with memory.recompute "
            "null"
        )
    return forecast.samples_per_second


@dataclass(frozen=True)
class _Answer:
    """The printed answer: all strategies on one cluster, and the best one on others."""

    forecast: Forecast
    exact_only: bool

    @cached_property
    def predictions(self) -> list[Prediction]:
        return self.forecast.exact() if self.exact_only else self.forecast.all()

    @cached_property
    def recommended(self) -> Prediction:
        return self.forecast.recommended(self.predictions)

    @property
    def best(self) -> Strategy:
        return self.recommended.strategy

    @cached_property
    def beside(self) -> tuple[list[Beside], tuple[str, ...]]:
        return self.forecast.beside(self.recommended)

    @cached_property
    def meetings(self) -> RareMeetings | None:
        """The choice whether and how rarely ranks meet; None: only exact ways are asked about."""
        exchanges = [one for one in self.predictions if one.strategy.local is None]
        return None if self.exact_only else self.forecast.meetings(exchanges)

    def curves(self) -> Mapping[str, list[ScaleOutPoint]]:
        """The best strategy over nodes and over rates; empty where not possible."""
        forecast = self.forecast
        return {
            "nodes": forecast.over_nodes(self.best),
            "rates": forecast.over_rates(self.best),
        }

    def document(self) -> dict[str, Any]:
        """The numbers of all tables, with every strategy in full."""
        network, (found, unpredicted) = self.forecast.network, self.beside
        return {
            "world_size": network.world_size,
            "extrapolated": network.extrapolated,
            "recommended": label(self.best),
            "strategies": [
                {"name": label(p.strategy), **asdict(p), "strategy": p.strategy.document()}
                for p in self.predictions
            ],
            **{over: [_point(point) for point in points] for over, points in self.curves().items()},
            "beside": [one._asdict() for one in found],
            "unpredicted": list(unpredicted),
            "meetings": None if self.meetings is None else self.meetings.reason,
        }


def _forecast(
    trace: Path | None,
    cluster: Path | None,
    nodes: int | None,
    ranks_per_node: int | None,
    rate: str | None,
    updates: int | None,
) -> Forecast:
    """Read what was recorded and measured.

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
    recorded, measured = chrome.read(trace), NetworkProfile.load(cluster)
    return Forecast.elsewhere(
        *(recorded, measured),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        rate=bits,
        updates=updates,
    )


def _deliver(answer: _Answer, output: Path | None, predicted: Path | None, as_json: bool) -> None:
    """Write the files that were asked for, and print JSON or tables."""
    if output is not None:
        write_strategy(answer.best, output)
    if predicted is not None:
        future = answer.forecast.simulated(answer.best, PREDICTED_STEPS)
        meta = {**future.meta, "interval": list(answer.recommended.interval)}
        chrome.write(replace(future, meta=meta), predicted)
    if as_json:
        typer.echo(json.dumps(answer.document(), indent=2))
        return
    console = Console()
    _print(answer, console)
    if output is not None:
        what = "strategy of the trace" if answer.best == answer.forecast.base else "best strategy"
        console.print(Text(f"The {what} is in {output}."), soft_wrap=True)


def _print(answer: _Answer, console: Console) -> None:
    """The tables, and what is uncertain about them."""
    network, best = answer.forecast.network, answer.recommended
    console.print(ranking(answer.predictions, best, answer.forecast.base, network))
    if doubt := unsure(answer.predictions[0], best, answer.forecast.base):
        console.print(Text(doubt))
    if words := besides(*answer.beside, best):
        console.print(words)
    if answer.meetings is not None:
        console.print(Text(f"Meeting rarely: {answer.meetings.reason}."))
    for doubt in network.doubts:
        console.print(Text(f"warning: {doubt}", style="yellow"))
    if network.extrapolated:
        console.print(Text(f"Extrapolated: {network.extrapolated}", style="yellow"))
    titles = {
        "nodes": f"more and fewer nodes, {ranks(network.ranks_per_host)} each",
        "rates": f"other links, {ranks(network.world_size)}",
    }
    for over, points in answer.curves().items():
        if points:
            console.print("", curve(f"{label(answer.best)}: {titles[over]}", points, over))


def _refuse(context: str, **options: object) -> None:
    """Refuse options that have no effect.

    Raises:
        StrategyError: names the option.
    """
    for name, value in options.items():
        if value is not None:
            raise StrategyError(f"--{name.replace('_', '-')} has no effect with {context}")


def _point(point: ScaleOutPoint) -> dict[str, Any]:
    where = {"nodes": point.nodes, "ranks": point.ranks, "rate": point.rate}
    names = ("seconds", "interval", "samples_per_second", "efficiency")
    return where | {name: getattr(point.prediction, name) for name in names}
