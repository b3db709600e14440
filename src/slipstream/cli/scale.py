"""``slipstream scale``: measure how a training speeds up with more ranks on this machine.

The script stays as it is: each run is the user's own command line, started by ``slipstream
launch``, traced for a few iterations, and then stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer import Option

from slipstream.analysis.breakdown import typical_iteration
from slipstream.analysis.compact_table import compact
from slipstream.analysis.throughput import compute_share, iterations_per_second, samples_per_second
from slipstream.analysis.time_unit import TimeUnit
from slipstream.cli.options import Script, ScriptArgs, StrategyOption
from slipstream.cli.ranks import (
    end_on_signals,
    log_folder,
    make_log_folder,
    refuse_launcher,
    slipstream,
    threads_per_rank,
)
from slipstream.cluster.launcher import LaunchSpec
from slipstream.errors import LaunchError, StrategyError
from slipstream.files.write import write_whole
from slipstream.strategy import Strategy
from slipstream.trace.event import Trace
from slipstream.trace.timeline import timeline
from slipstream.tuner.own_strategy import own_strategy
from slipstream.tuner.trials import STRATEGY, Failure, Measurement, Trials

BAR = 40

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The speed of one run, also relative to the run of the fewest ranks.

    ``rate`` is in samples a second, or in batches a second where the traces do not count samples.
    ``speed_up`` is ``rate / rate of the fewest ranks``; ``efficiency`` divides it by the ratio of
    ranks. ``iteration`` and ``exposed`` (exchange) are in seconds, means over the middle half of
    the iterations.
    """

    ranks: int
    iteration: float
    rate: float
    speed_up: float
    efficiency: float
    compute_share: float
    exposed: float


def scale(
    script: Script,
    args: ScriptArgs = None,
    ranks: Annotated[str, Option(help="Numbers of ranks to run with.")] = "1,2,4",
    steps: Annotated[int, Option(min=1, help="Iterations to measure in each run.")] = 10,
    skip: Annotated[int, Option(min=0, help="Iterations before them, as warm-up.")] = 3,
    limit: Annotated[float, Option(help="Time limit of a run, in seconds.")] = 600.0,
    strategy: StrategyOption = None,
    folder: Annotated[
        Path | None, Option(help="For traces, logs, JSON. Default: slipstream-logs/scale-TIME.")
    ] = None,
) -> None:
    """Measure how a training speeds up with more ranks of this machine.

    The script runs once with each number of ranks, under the same strategy, until its trace is
    complete; then it is stopped. It must leave the strategy to accelerate(), which takes it from
    SLIPSTREAM_STRATEGY. A rank has the same number of threads in every run: the cores divided by
    the largest number of ranks, or OMP_NUM_THREADS if it is set.

    [dim]slipstream scale -- train.py --batch 32[/dim]
    [dim]slipstream scale --ranks 1,2,4,8 --steps 20 --strategy strategy.yaml -- train.py[/dim]
    """
    refuse_launcher("slipstream scale --ranks 1,2,4 -- train.py")
    if not limit > 0:  # nan, too
        raise LaunchError(f"--limit {limit:g}: must be more than 0 seconds")
    counts, base = parse_ranks(ranks), Strategy.load(strategy)
    if base.local is not None:
        raise StrategyError(
            "--strategy with local: a run measures single iterations, of which few exchange "
            "anything there, if any; time whole rounds in the loop itself, also under slipstream "
            "testbed run"
        )
    folder = folder or log_folder("scale-")
    words = [script, *(args or [])]
    LaunchSpec(script=script, log_dir=folder)  # checks that the script exists
    traces: dict[int, Trace] = {}
    make_log_folder(folder, "choose another place by --folder")
    end_on_signals()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        for count in counts:
            progress.update(task, description=f"{count} ranks: {steps} steps after {skip}")
            command = _command(words, count, max(counts))
            trials = Trials(command, folder / f"ranks-{count}", steps, skip)
            traces[count] = _trace(trials.run(base, limit), count, own_strategy(script))
    points, unit = curve(traces)
    document = {
        "command": words,
        "strategy": base.document(),
        "unit": f"{unit}/s",
        "points": [asdict(point) for point in points],
    }
    Console().print(_table(points, unit), plot(points), *_remarks(points, unit), sep="\n")
    try:
        write_whole(folder / "scale.json", json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise LaunchError(f"{folder / 'scale.json'} cannot be written: {error.strerror}") from error
    console.print(Text(f"numbers: {folder / 'scale.json'}; traces beside it"), soft_wrap=True)


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks, ascending.

    Raises:
        LaunchError: not numbers above 0.

    Example:
        >>> parse_ranks("4,1,2")
        [1, 2, 4]
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise LaunchError(f"--ranks {text!r}: write numbers above 0 and commas, such as 1,2,4")
    return sorted(set(map(int, words)))


def curve(traces: Mapping[int, Trace]) -> tuple[list[ScalePoint], str]:
    """The points of the curve, fewest ranks first, and the unit of their rates.

    Example:
        >>> from slipstream.trace.event import Event
        >>> def run(ranks, seconds):
        ...     one = [Event("iteration", r, 0, 0.0, seconds, {"samples": 8}) for r in range(ranks)]
        ...     return Trace(tuple(one))
        >>> points, unit = curve({1: run(1, 0.4), 2: run(2, 0.5)})
        >>> [(point.rate, point.speed_up, point.efficiency) for point in points], unit
        ([(20.0, 1.0, 1.0), (32.0, 1.6, 0.8)], 'samples')
    """
    runs = {count: timeline(trace.events) for count, trace in sorted(traces.items())}
    samples = {count: samples_per_second(run) for count, run in runs.items()}
    rates = {count: rate for count, rate in samples.items() if rate is not None}
    unit = "samples" if len(rates) == len(runs) else "batches"
    if unit == "batches":
        rates = {count: iterations_per_second(run) for count, run in runs.items()}
    fewest = next(iter(rates))
    points = []
    for count, run in runs.items():
        middle, speed_up = typical_iteration(run), rates[count] / rates[fewest]
        points.append(
            ScalePoint(
                ranks=count,
                iteration=middle.spread("iteration").mean,
                rate=rates[count],
                speed_up=speed_up,
                efficiency=speed_up * fewest / count,
                compute_share=compute_share(middle),
                exposed=middle.spread("exposed").mean,
            )
        )
    return points, unit


def plot(points: Sequence[ScalePoint]) -> Text:
    """The speed-ups as bars; dots mark the linear speed-up.

    Example:
        >>> print(plot([ScalePoint(1, 0.4, 20.0, 1.0, 1.0, 1.0, 0.0),
        ...             ScalePoint(2, 0.5, 32.0, 1.6, 0.8, 0.8, 0.1)]))
        speed-up (dots: linear)
           1 rank  |####################                     1.00
           2 ranks |################################........ 1.60
    """
    most = points[-1].ranks / points[0].ranks
    drawing = Text("speed-up (dots: linear)")
    for point in points:
        linear = round(BAR * point.ranks / points[0].ranks / most)
        reached = min(round(BAR * point.speed_up / most), BAR)
        bar = "#" * reached + "." * (linear - reached)
        name = "rank " if point.ranks == 1 else "ranks"
        drawing.append(f"\n{point.ranks:4} {name} |{bar:{BAR}} {point.speed_up:.2f}")
    return drawing


def _command(words: Sequence[str], count: int, most: int) -> Callable[[Path], list[str]]:
    """The command of a run, given its folder."""
    # Threads for the most ranks in every run: otherwise more ranks would mean slower ranks.
    threads = ["env", f"OMP_NUM_THREADS={threads_per_rank(most)}"]

    def command(folder: Path) -> list[str]:
        files = {"strategy": folder / STRATEGY, "log_dir": folder / "logs"}
        return [*threads, *slipstream("launch", "--", *words, nproc=count, **files)]

    return command


def _trace(outcome: Measurement | Failure, count: int, hidden: str | None) -> Trace:
    if isinstance(outcome, Measurement):
        return outcome.trace
    fix = {
        "failed": "Fix the script, or check that it runs with this number of ranks.",
        "no trace": "It must take more steps than --skip, and train by slipstream.accelerate() or "
        "an adapter, without a strategy of its own.",
        "hanging": "Raise --limit or lower --steps, and check that it trains by "
        "slipstream.accelerate() or an adapter, without a strategy of its own.",
    }[outcome.status]
    if hidden and outcome.status != "failed":
        fix = f"The reason: {hidden}."
    raise LaunchError(f"the run with --ranks {count}: {outcome.reason}. {fix}")


def _table(points: Sequence[ScalePoint], unit: str) -> Table:
    time = TimeUnit.of(max(point.iteration for point in points))
    iteration = f"iteration {time.name}"
    headings = ("speed-up", "efficiency", f"{unit}/s", iteration, "compute", "exposed")
    table = compact("Scaling on this machine", "ranks", *headings)
    for point in points:
        table.add_row(
            str(point.ranks),
            f"{point.speed_up:.2f}",
            f"{point.efficiency:.1%}",
            f"{point.rate:.5g}",
            time.number(point.iteration),
            f"{point.compute_share:.1%}",
            f"{point.exposed / point.iteration:.1%}" if point.iteration else "-",
        )
    return table


def _remarks(points: Sequence[ScalePoint], unit: str) -> Iterator[Text]:
    """Explain the numbers, and what limits them."""
    cores, most, fewest = len(os.sched_getaffinity(0)), points[-1].ranks, points[0].ranks
    yield Text(
        f"Efficiency: speed-up over {fewest} rank{'s' * (fewest > 1)} divided by the ratio of "
        "ranks; linear is 100 %. Compute and exposed exchange: shares of an iteration."
    )
    if most > cores:
        yield Text(
            f"{most} ranks share {cores} cores here: that limits the speed-up, too.", "yellow"
        )
    if unit == "batches":
        yield Text(
            "The traces do not count samples, so the rates count batches: they compare only if a "
            "batch is as large with any number of ranks.",
            "yellow",
        )
