"""``slipstream tune``: find the fastest strategy for a training script by running it, briefly.

Never changes the script or what it is given: every trial is the user's own command line, started by
``slipstream launch`` or ``slipstream testbed run`` with a strategy of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.plan.command import check_output, check_place, write_strategy
from slipstream.cli.tune.display import Display, table
from slipstream.cluster.environment import Environment
from slipstream.cluster.launcher import LaunchSpec
from slipstream.errors import LaunchError, TestbedError
from slipstream.planner.candidates import candidates
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.ranking import Prediction, rank
from slipstream.strategy import ByBytes, Optimal, Strategy
from slipstream.testbed import Testbed, unavailable
from slipstream.trace import Trace
from slipstream.tuner.trial_log import Trial
from slipstream.tuner.trials import STRATEGY, Trials, last_words, started
from slipstream.tuner.tune import Tuner

console = Console(stderr=True)

SLIPSTREAM = (sys.executable, "-m", "slipstream")
MOST_SECONDS = 20.0  # for the network
_UNITS = {"s": 1, "m": 60, "h": 3600}


def tune(
    script: Annotated[str, typer.Argument(help="Python file of the training.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="All that follows goes to the script untouched.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for everything: 90s, 10m, 1h.")] = "10m",
    exact_only: Annotated[
        bool,
        typer.Option(
            "--exact-only/--allow-lossy",
            help="Only what leaves the mathematics as it is, or larger batches (accumulate), too.",
        ),
    ] = True,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks; with --nodes, of each host.", show_default="2, or 1"),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Run on so many emulated hosts (slipstream testbed).")
    ] = None,
    rate: Annotated[str, typer.Option(help="Of their links: 300mbit, 1gbit ...")] = "1gbit",
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PRESET", envvar="SLIPSTREAM_STRATEGY", help="Where to start from."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="cluster.yaml of `slipstream doctor network`; else it is measured."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Iterations to measure of a trial.")] = 10,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the best strategy goes.")
    ] = Path("strategy.yaml"),
    log: Annotated[Path, typer.Option(help="Where every trial is noted.")] = Path("trials.json"),
) -> None:
    """Find the strategy under which a training is fastest, and write it to a file.

    The script runs for a few iterations at a time and is then stopped: once to trace it, then under
    the strategies that are predicted to be fastest, then the best of them against the first in
    turn. If none is faster beyond the noise, the strategy you came with is what is written.

    The script must leave the strategy to accelerate(), and step more than three times; what it
    writes itself, it writes in every trial.

    [dim]slipstream tune --ranks 4 -- train.py --batch 32[/dim]
    [dim]slipstream tune --budget 5m --nodes 4 --rate 1gbit -- train.py[/dim]
    """
    _refuse_ranks()
    check_output(output)
    _check_not_lost(output, strategy)
    check_place("--log", log)
    seconds = parse_budget(budget)
    base = _start(Strategy.load(strategy))
    known = NetworkProfile.load(cluster) if cluster else None
    folder = Path("slipstream-logs", f"tune-{time.strftime('%F_%H-%M-%S')}-{os.getpid()}")
    where = _where(script, ranks, nodes, rate)
    with _ended_by_signals(), Display(seconds, console) as display:

        def predict(trace: Trace) -> list[Prediction]:
            here = known or _measure_network(where, folder / "network", display)
            for doubt in here.doubts:
                display.warn(doubt)
            workload, here = prepare(trace, here)
            return rank(candidates(workload, here, exact_only, base), workload, here, base)

        def notify(done: Sequence[Trial]) -> None:
            log.write_text(json.dumps([asdict(trial) for trial in done], indent=1))
            display.show(done[-1])

        tuned = Tuner(
            run=Trials(where.command(script, args or []), folder, steps).run,
            predict=predict,
            base=base,
            budget=seconds,
            notify=notify,
            doing=display.doing,
        ).tune()
    write_strategy(tuned.strategy, output)
    Console().print(table(tuned))
    console.print(Text(tuned.verdict, style="bold"))
    for what, path in {"strategy": output, "trials": log, "their logs": folder}.items():
        console.print(Text(f"{what}: {path}"), soft_wrap=True)


def parse_budget(text: str) -> float:
    """Seconds of a time as people write it.

    Raises:
        LaunchError: it is none, or not above 0.

    Example:
        >>> parse_budget("90s"), parse_budget("10m"), parse_budget("1.5h")
        (90.0, 600.0, 5400.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise LaunchError(f"--budget {text!r}: write a number and s, m or h, such as 90s or 10m")
    return seconds


def _check_not_lost(output: Path, strategy: str | None) -> None:
    """A strategy file is only replaced by what was found starting from it.

    Raises:
        LaunchError: it would be lost.
    """
    started_from = strategy is not None and Path(strategy).exists()
    if output.exists() and not (started_from and output.samefile(str(strategy))):
        raise LaunchError(
            f"--output {output} exists, and would be lost: start from it (--strategy {output}), or "
            "choose another file"
        )


def _start(strategy: Strategy) -> Strategy:
    """The strategy to start from: no trial lives long enough to find a split by itself."""
    gradients = strategy.gradients
    if not isinstance(gradients.split, Optimal):
        return strategy
    console.print("split: optimal is found during a long training; this starts from the default")
    gradients = gradients.model_copy(update={"split": ByBytes()})
    return strategy.model_copy(update={"gradients": gradients})


def _refuse_ranks() -> None:
    """Under a launcher there would be one tuner a rank."""
    here = Environment.read(os.environ, socket.gethostname())
    if here.source != "none":
        raise LaunchError(
            f"a launcher ({here.source}) has started this as rank {here.rank}, but tune starts the "
            "ranks itself, again and again. Run it once, without a launcher: `slipstream tune "
            "--ranks N -- train.py`, or with --nodes and --rate for emulated hosts"
        )


@dataclass(frozen=True)
class _Where:
    """Where trials run: on ranks of this host, or on emulated hosts."""

    ranks: int
    nodes: int | None
    rate: str

    def command(self, script: str, args: Sequence[str]) -> Callable[[Path], list[str]]:
        """The command of a trial, given its folder."""
        if self.nodes is None:
            words = ["launch", "--nproc", str(self.ranks)]
        else:
            words = ["testbed", "run", *self._hosts()]

        def command(folder: Path) -> list[str]:
            files = ["--strategy", str(folder / STRATEGY), "--log-dir", str(folder / "logs")]
            return [*SLIPSTREAM, *words, *files, "--", script, *args]

        return command

    def doctor(self, output: Path, seconds: float) -> list[str]:
        """The command that measures the network there."""
        words = self._hosts() if self.nodes else ["--ranks", str(self.ranks)]
        wishes = ["--output", str(output), "--seconds", f"{seconds:.0f}"]
        return [*SLIPSTREAM, "doctor", "network", *words, *wishes]

    def _hosts(self) -> list[str]:
        ranks = ["--ranks-per-node", str(self.ranks)]
        return ["--nodes", str(self.nodes), "--rate", self.rate, *ranks]


def _where(script: str, ranks: int | None, nodes: int | None, rate: str) -> _Where:
    """What is wrong with where trials run is found now, once."""
    LaunchSpec(script=script, log_dir=Path())
    where = _Where(ranks or (1 if nodes else 2), nodes, rate)
    if nodes is not None:
        Testbed(nodes, rate)
        if reason := unavailable():
            raise TestbedError(reason)
    if where.ranks * (nodes or 1) == 1:
        raise LaunchError("a single rank exchanges nothing: there is nothing to tune; give --ranks")
    return where


def _measure_network(where: _Where, folder: Path, display: Display) -> NetworkProfile:
    """What exchanges cost where the trials run."""
    display.doing("measuring the network")
    folder = folder.resolve()
    file = folder / "cluster.yaml"
    seconds = min(MOST_SECONDS, max(2.0, display.left() / 20))
    with started(where.doctor(file, seconds), folder) as process:
        try:
            code = process.wait(display.left())
        except subprocess.TimeoutExpired:
            raise LaunchError(
                "the budget ended while the network was measured: give a larger --budget, or the "
                "file of an earlier measurement (--cluster)"
            ) from None
    if code:
        raise LaunchError(f"the network could not be measured: {last_words(folder)}")
    return NetworkProfile.load(file)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the tuner as Ctrl-C does: no process of a trial is left behind."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
