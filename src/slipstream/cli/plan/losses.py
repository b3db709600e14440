"""``slipstream plan --to-loss`` and ``--for``: rank strategies by the whole training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.strategy_file import write_strategy
from slipstream.cli.time_to_loss import LOSSY_ALONE, document, doubts, duration, table
from slipstream.errors import ClusterError, StrategyError
from slipstream.planner.forecast import Forecast
from slipstream.planner.progress.calibration import MADE_BY, LossCalibration, mathematics
from slipstream.planner.progress.time_to_loss import (
    LossAfter,
    LossForecast,
    Timed,
    TimeToLoss,
    verdict,
)
from slipstream.planner.search.label import label
from slipstream.strategy import Strategy, at_once
from slipstream.strategy.duration import seconds_of


class Goal(NamedTuple):
    """A question, by one of the first two, and the losses that are known."""

    loss: float | None
    seconds: float | None
    calibration: LossCalibration


def read_goal(
    to_loss: float | None, for_time: str | None, losses: Path | None, *, exact_only: bool
) -> Goal | None:
    """Read the options; None: an iteration is asked about.

    Raises:
        StrategyError: an option lacks another one, or is no time; or exact strategies alone are to
            be compared, which reach every loss in the same number of updates.
        TraceError: the file of losses cannot be read.
    """
    if to_loss is None and for_time is None:
        if losses is not None:
            raise StrategyError("--losses has no effect without --to-loss or --for")
        return None
    if to_loss is not None and for_time is not None:
        raise StrategyError("--to-loss and --for are two questions: give one of them")
    option = "--to-loss" if for_time is None else "--for"
    if losses is None:
        raise StrategyError(
            f"{option} needs --losses, the file of losses of short runs of this training: `"
            f"{MADE_BY}` writes one"
        )
    if exact_only:
        raise StrategyError(f"{option} {LOSSY_ALONE}")
    seconds = None if for_time is None else seconds_of(for_time)
    if for_time is not None and not seconds:
        raise StrategyError(f"--for {for_time!r}: write a number and s, m or h, such as 30m or 6h")
    return Goal(to_loss, seconds, LossCalibration.load(losses))


def plan_losses(forecast: Forecast, goal: Goal, *, output: Path | None, as_json: bool) -> None:
    """Rank strategies whose losses are known, and print or write the choice.

    Args:
        forecast: of an iteration.
        goal: of the training.
        output: file of the choice.
        as_json: print numbers, not a table.

    Raises:
        StrategyError: the trace and the losses are of runs with other mathematics, models or
            numbers of ranks; or as `LossForecast.to_loss`.
    """
    losses = LossForecast(goal.calibration)
    base = forecast.base
    if mathematics(base) != mathematics(losses.base):
        raise StrategyError(
            f"the trace is of a run under {label(base)}, the losses compare others with "
            f"{label(losses.base)}: their updates differ; record the trace under that strategy"
        )
    if problem := goal.calibration.problem(forecast.trace):
        raise StrategyError(
            f"the trace and the losses are of two trainings ({problem}): record the trace of the "
            f"one, or run `{MADE_BY}` for the other"
        )
    timed, unknown, unpriced = _known(forecast, losses)
    found: Sequence[TimeToLoss] | Sequence[LossAfter]
    if goal.loss is not None:
        found, title = losses.to_loss(goal.loss, timed), f"time to a loss of {goal.loss:g}"
    else:
        assert goal.seconds is not None
        found = losses.after(goal.seconds, timed)
        title = f"loss after {duration(goal.seconds)}"
    chosen, words = verdict(found, base)
    if output is not None:
        write_strategy(chosen, output)
    far = doubts(losses, found, base, goal.seconds)
    warnings = [*far, *unpriced, *forecast.network.doubts]
    if as_json:
        said = document(found, base) | {"warnings": warnings, "unknown": unknown}
        typer.echo(json.dumps(said, indent=2))
        return
    console = Console()
    console.print(table(found, base, title))
    for doubt in warnings:
        console.print(Text(f"warning: {doubt}", style="yellow"), soft_wrap=True)
    if unknown:
        text = f"{unknown} more have losses that the file does not tell: `{MADE_BY}` runs them."
        console.print(Text(text), soft_wrap=True)
    console.print(Text(f"{words}.", style="bold"), soft_wrap=True)
    if output is not None:
        console.print(Text(f"The strategy is in {output}."), soft_wrap=True)


class _Known(NamedTuple):
    """Strategies whose losses and seconds are known, the baseline first; of the others the number
    of those without losses, and why the rest has no seconds."""

    timed: list[Timed]
    unknown: int
    unpriced: list[str]


def _known(forecast: Forecast, losses: LossForecast) -> _Known:
    """List the fastest of each kind of mathematics; of the baseline's what `Forecast.recommended`
    is sure of."""
    ranked = forecast.all()
    unpriced = []
    listed = {one.strategy for one in ranked}
    for run in losses.timed():
        if run.strategy not in listed:
            try:
                ranked += forecast.rank([run.strategy])
            except (ClusterError, StrategyError) as error:
                unpriced.append(f"{label(run.strategy)} is left out: {error}")
    base = forecast.base
    baseline = next(one for one in ranked if one.strategy == base)
    of_base = mathematics(base)
    same = forecast.recommended([o for o in ranked if mathematics(o.strategy) == of_base])
    fastest = {of_base: Timed.of(same, baseline)}
    for one in ranked:  # the one to prefer comes first
        fastest.setdefault(mathematics(one.strategy), Timed.of(one, baseline))
    told = [one for one in fastest.values() if losses.source(one.strategy) is not None]
    others = [one for one in told if one.strategy != base]
    known = {_from_the_start(one.strategy) for one in told}
    unknown = {_from_the_start(one.strategy) for one in fastest.values()} - known
    return _Known([Timed.of(baseline, baseline), *others], len(unknown), unpriced)


def _from_the_start(strategy: Strategy) -> str:
    """The mathematics with a codec that begins at once, as it runs for its losses."""
    return mathematics(strategy.with_gradients(codec=at_once(strategy.gradients.codec)))
