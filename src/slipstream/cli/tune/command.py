"""``slipstream tune``: find the fastest strategy for a training script by short runs of it.

The script and its arguments stay as they are: every trial is the user's own command line, started
by ``slipstream launch`` or ``slipstream testbed run`` with the strategy of that trial.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Option

from slipstream.cli import options
from slipstream.cli.options import (
    EmulatedRate,
    ExactOnly,
    Script,
    ScriptArgs,
    StrategyOption,
    Updates,
)
from slipstream.cli.ranks import (
    end_on_signals,
    log_folder,
    make_log_folder,
    refuse_launcher,
)
from slipstream.cli.strategy_file import write_strategy
from slipstream.cli.time_to_loss import LOSSY_ALONE
from slipstream.cli.tune.display import Display, table
from slipstream.cli.tune.place import TrialNetwork, TrialPlace
from slipstream.cli.tune.to_loss import show, tune_to_loss
from slipstream.cluster.launcher import LaunchSpec
from slipstream.errors import LaunchError, StrategyError
from slipstream.files.write import write_whole
from slipstream.planner.forecast import Forecast
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import AutoConfig, ByBytesConfig, FlatConfig, OptimalConfig, Strategy
from slipstream.strategy.duration import seconds_of
from slipstream.strategy.yaml import SUFFIXES
from slipstream.trace import Trace
from slipstream.tuner.measured_choices import MEASURED_CHOICES
from slipstream.tuner.own_strategy import own_strategy
from slipstream.tuner.to_loss import TunedToLoss, check_updates
from slipstream.tuner.trial_log import Trial, Tuned
from slipstream.tuner.trials import Trials
from slipstream.tuner.tune import LEAST_BUDGET, Tuner

console = Console(stderr=True)


Budget = Annotated[str, Option(help="Time for everything: 5m, 1h.")]
NumRanks = Annotated[
    int | None,
    Option(min=1, help="Ranks on this host; with --nodes, of each host.", show_default="2, or 1"),
]
NumNodes = Annotated[int | None, Option(help="Emulated hosts to run on (slipstream testbed).")]
_ClusterFile = Annotated[
    Path | None, Option(help="cluster.yaml of `slipstream doctor network`. Default: measure it.")
]
Steps = Annotated[
    int | None,
    Option(
        min=1,
        help="Iterations to measure in a trial; with --to-loss updates of a run, from the first.",
        show_default="10, or 150",
    ),
]
TargetLoss = Annotated[
    float | None,
    Option(help="With --allow-lossy: find what reaches this training loss first, not the fastest."),
]
LossesFile = Annotated[
    Path | None,
    Option(help="With --to-loss: file of the runs' losses.", show_default="losses.json"),
]
_Output = Annotated[Path, Option("--output", "-o", help="File of the best strategy.")]
_TrialLog = Annotated[Path, Option(help="File of all trials, as JSON.")]


def tune(
    script: Script,
    args: ScriptArgs = None,
    budget: Budget = "10m",
    exact_only: ExactOnly = True,
    ranks: NumRanks = None,
    nodes: NumNodes = None,
    rate: EmulatedRate = None,
    strategy: StrategyOption = None,
    cluster: _ClusterFile = None,
    updates: Updates = None,
    steps: Steps = None,
    to_loss: TargetLoss = None,
    losses: LossesFile = None,
    output: _Output = Path("strategy.yaml"),
    log: _TrialLog = Path("trials.json"),
) -> None:
    """Find the strategy under which a training is fastest, and write it to a file.

    The script runs for some iterations at a time and is then stopped: once under --strategy, or
    the default, to trace it; once to try all exact ways to exchange, in turn; then, with
    --allow-lossy, under what is predicted to be fastest; then with settings of compute, such as
    compile. What these found runs in alternation with the first. If nothing is faster beyond the
    noise, the strategy that it started from is written.

    With --to-loss every run begins at the first update and keeps its losses, and what is chosen is
    predicted to reach that loss first; slipstream plan predicts from the file of losses, too.

    The script must leave the strategy to accelerate() or its adapter, and take some 80 steps. Files
    that it writes are written again in every run; slipstream.Checkpoints are left alone.

    [dim]slipstream tune --ranks 4 -- train.py --batch 32[/dim]
    [dim]slipstream tune --budget 5m --nodes 4 --rate 1gbit -- train.py[/dim]
    [dim]slipstream tune --allow-lossy --updates 20000 --ranks 4 -- train.py[/dim]
    [dim]slipstream tune --allow-lossy --to-loss 3.2 --ranks 4 -- train.py[/dim]
    """
    refuse_launcher("slipstream tune --ranks N -- train.py")
    options.check_writable("--output", output, SUFFIXES)
    _check_not_lost(output, strategy)
    options.check_suffix("--log", log, (".json",), device=True)
    options.check_writable("--log", log)
    seconds, base = parse_budget(budget), _start(Strategy.load(strategy))
    _check_effects(cluster, updates, rate, nodes, exact_only=exact_only)
    losses = _check_losses(losses, to_loss, steps, exact_only=exact_only)
    sources: dict[str, str | Path | None] = {"the script": script, "--cluster": cluster}
    if not output.exists():  # else it is the strategy
        sources["--strategy"] = strategy
    results = {"--output": output, "--log": log, "--losses": losses if to_loss else None}
    options.check_apart(results, sources)
    known = NetworkProfile.load(cluster) if cluster else None
    folder = log_folder("tune-")
    LaunchSpec(script=script, log_dir=folder)  # checks that the script exists
    place = TrialPlace(ranks or (1 if nodes else 2), nodes, rate or "1gbit")
    make_log_folder(folder, "start it in a folder that can be written")
    trials = Trials(place.command(script, args or []), folder, steps or 10)
    end_on_signals()
    before = _changed(log)  # by an earlier run
    found: Tuned | TunedToLoss
    try:
        with Display(seconds, console) as display:
            network = TrialNetwork(place, known, folder / "network", display)
            hidden, notify = own_strategy(script), partial(_notify, log, display)
            if to_loss is not None:
                given = (trials, base, to_loss, seconds, network.profile, display)
                found = tune_to_loss(
                    *given, steps=steps, total=updates, hidden=hidden, notify=notify
                )
            else:
                found = Tuner(
                    run=trials.run,
                    base=base,
                    budget=seconds,
                    predict=None if exact_only else partial(_predict, updates, network),
                    choices=MEASURED_CHOICES,
                    updates=updates,
                    hidden=hidden,
                    notify=notify,
                    doing=display.doing,
                ).tune()
    except (KeyboardInterrupt, SystemExit):
        left = f"; the trials so far are in {log}" if _changed(log) != before else ""
        console.print(Text(f"stopped: no strategy was written{left}"), soft_wrap=True)
        raise
    _show(found, losses, {"strategy": output, "trials": log, "their logs": folder})
    write_strategy(found.strategy, output)  # last: a disk may be full


def _changed(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _predict(
    updates: int | None, network: TrialNetwork, trace: Trace, base: Strategy
) -> list[Prediction]:
    """Predictions of ``base`` and of lossy strategies on its exchange, the fastest first."""
    return Forecast.of(trace, network.profile(), base, updates).lossy()


def _notify(log: Path, display: Display, done: Sequence[Trial]) -> None:
    """Write all trials, and show the last one."""
    display.show(done[-1])
    try:
        write_whole(log, json.dumps([asdict(trial) for trial in done], indent=1))
    except OSError as error:  # what is measured goes on
        console.print(Text(f"{log} cannot be written: {error.strerror}"), soft_wrap=True)


def _show(found: Tuned | TunedToLoss, losses: Path, files: dict[str, Path]) -> None:
    """Print the choice and why, and where all of it is; keep the losses of runs that have some."""
    if isinstance(found, Tuned):
        Console().print(table(found))
        Console().print(Text(found.verdict, style="bold"))
    else:
        found.calibration.save(losses)
        show(found, Console())
        files["losses"] = losses
    for name, path in files.items():
        Console().print(Text(f"{name}: {path}"), soft_wrap=True)


def parse_budget(text: str) -> float:
    """Seconds of a time with its unit.

    Raises:
        LaunchError: not a time, or less than LEAST_BUDGET.

    Example:
        >>> parse_budget("90s"), parse_budget("10m"), parse_budget("1.5h")
        (90.0, 600.0, 5400.0)
    """
    seconds = seconds_of(text)
    if not seconds:
        raise LaunchError(f"--budget {text!r}: write a number and s, m or h, such as 5m or 1h")
    if seconds < LEAST_BUDGET:
        raise LaunchError(
            f"--budget {text}: too short to start a training twice; allowed: {LEAST_BUDGET:.0f}s "
            "or more, and most scripts take some minutes"
        )
    return seconds


def _check_effects(
    cluster: Path | None,
    updates: int | None,
    rate: str | None,
    nodes: int | None,
    *,
    exact_only: bool,
) -> None:
    """Refuse options that change nothing.

    Raises:
        LaunchError: names the option, and what it lacks.
    """
    if cluster is not None and exact_only:
        raise LaunchError(
            "--cluster has no effect without --allow-lossy: exact choices are measured"
        )
    if updates is not None and exact_only:
        raise LaunchError(
            "--updates has no effect without --allow-lossy: exact choices are alike in all updates"
        )
    if rate is not None and nodes is None:
        raise LaunchError("--rate has no effect without --nodes: it is that of emulated links")


def _check_not_lost(output: Path, strategy: str | None) -> None:
    """Refuse to overwrite a strategy file, unless tuning starts from it.

    Raises:
        LaunchError: the file exists and is not the one to start from.
    """
    base = Path(strategy or "")
    if output.exists() and not (base.exists() and output.samefile(base)):
        raise LaunchError(
            f"--output {output} exists and would be overwritten: start from it (--strategy "
            f"{output}), or choose another file"
        )


def _check_losses(
    losses: Path | None, to_loss: float | None, steps: int | None, *, exact_only: bool
) -> Path:
    """Choose the file of losses.

    Raises:
        LaunchError: an option of --to-loss lacks it, or it lacks another one.
    """
    if to_loss is None:
        if losses is not None:
            raise LaunchError("--losses has no effect without --to-loss")
        return Path()
    if exact_only:
        raise LaunchError(f"--to-loss {LOSSY_ALONE}")
    if steps is not None:
        check_updates(steps)
    losses = losses or Path("losses.json")
    options.check_writable("--losses", losses)
    return losses


def _start(strategy: Strategy) -> Strategy:
    """The strategy to start from; a trial is too short for what a training finds by itself.

    Raises:
        StrategyError: under ``local`` ranks meet rarely, so that iterations cannot be compared.
    """
    if strategy.local is not None:
        raise StrategyError(
            "--strategy with local: trials compare single iterations, of which few exchange "
            "anything there; start from a strategy without it, or let it choose its own settings "
            "by local: auto"
        )
    gradients = strategy.gradients
    fixed: dict[str, object] = {}
    if isinstance(gradients.split, OptimalConfig):
        console.print("split: optimal needs a long training; tuning starts from the default split")
        fixed["split"] = ByBytesConfig()
    if isinstance(gradients.transport, AutoConfig):
        console.print("transport: auto needs a long training; tuning starts from flat")
        fixed["transport"] = FlatConfig()
    trace = strategy.trace
    if trace.norms:
        console.print("trace.norms is left out, as not all strategies allow it")
        trace = trace.model_copy(update={"norms": False})
    gradients = gradients.model_copy(update=fixed)
    return strategy.model_copy(update={"gradients": gradients, "trace": trace})
