"""``slipstream scale``: how much faster a training gets with more ranks on this machine.

Never changes the script: each run is the user's own command line, started by ``slipstream launch``,
traced for a few iterations, and then ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from slipstream.analysis.breakdown import typical_iteration
from slipstream.analysis.throughput import (
    compute_share,
    iterations_per_second,
    samples_per_second,
)
from slipstream.analysis.time_unit import TimeUnit
from slipstream.cluster.launcher import LaunchSpec
from slipstream.errors import LaunchError
from slipstream.strategy import Strategy
from slipstream.trace.event import Trace
from slipstream.trace.timeline import timeline
from slipstream.tuner.trials import STRATEGY, Failure, Measurement, Trials

BAR = 40

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its speed, and that against the run of the fewest ranks.

    ``rate`` counts samples a second, or batches where the traces do not tell samples. ``speed_up``
    is ``rate / rate of the fewest ranks``; ``efficiency`` divides that by the ratio of ranks.
    """

    ranks: int
    iteration: float
    rate: float
    speed_up: float
    efficiency: float
    compute_share: float
    exposed: float


def scale(
    script: Annotated[str, typer.Argument(help="Python file of the training.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="All that follows goes to the script untouched.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, in this order.")] = "1,2,4",
    steps: Annotated[int, typer.Option(min=1, help="Iterations to measure of each run.")] = 10,
    skip: Annotated[int, typer.Option(min=0, help="Iterations before, as warm-up.")] = 3,
    limit: Annotated[float, typer.Option(help="Longest a run may take, in seconds.")] = 600.0,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PRESET", envvar="SLIPSTREAM_STRATEGY", help="Strategy of the ranks."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="For traces, logs, JSON; default: slipstream-logs/scale-TIME."),
    ] = None,
) -> None:
    """Measure how a training speeds up with more ranks of this machine.

    The script runs once for each number of ranks, under the same strategy, until its trace is
    complete; then it is stopped. It has to take its strategy from SLIPSTREAM_STRATEGY, as
    `accelerate()` does where it is given none. Each rank gets the same number of threads in every
    run: the cores shared out among the most ranks, unless OMP_NUM_THREADS is set.

    [dim]slipstream scale -- train.py --batch 32[/dim]
    [dim]slipstream scale --ranks 1,2,4,8 --steps 20 --strategy strategy.yaml -- train.py[/dim]
    """
    counts, base = parse_ranks(ranks), Strategy.load(strategy)
    folder = folder or Path(
        "slipstream-logs", f"scale-{time.strftime('%F_%H-%M-%S')}-{os.getpid()}"
    )
    words = [script, *(args or [])]
    LaunchSpec(script=script, nproc=counts[0], log_dir=folder)  # what is wrong is found now
    traces: dict[int, Trace] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves no rank running, like Ctrl-C
    with _progress() as progress:
        task = progress.add_task("")
        for count in counts:
            progress.update(task, description=f"{count} ranks: {steps} steps after {skip}")
            command = _command(words, count, max(counts))
            trials = Trials(command, folder / f"ranks-{count}", steps, skip)
            traces[count] = _trace(trials.run(base, limit), count)
    points, what = curve(traces)
    document = {
        "command": words,
        "strategy": base.document(),
        "unit": f"{what}/s",
        "points": [asdict(point) for point in points],
    }
    (folder / "scale.json").write_text(json.dumps(document, indent=2) + "\n")
    Console().print(_table(points, what), plot(points), *_remarks(points, what), sep="\n")
    console.print(Text(f"numbers: {folder / 'scale.json'}; traces beside it"), soft_wrap=True)


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks, ascending.

    Raises:
        LaunchError: they are no such numbers, or a launcher has started this process.

    Example:
        >>> parse_ranks("4,1,2")
        [1, 2, 4]
    """
    if "RANK" in os.environ:
        raise LaunchError(
            f"RANK={os.environ['RANK']} is set: a launcher has started this, but scale starts the "
            "ranks itself. Run it once, without a launcher: slipstream scale -- train.py"
        )
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise LaunchError(f"--ranks {text!r}: write numbers above 0 and commas, such as 1,2,4")
    return sorted(set(map(int, words)))


def curve(traces: Mapping[int, Trace]) -> tuple[list[Point], str]:
    """The points of the curve, fewest ranks first, and what their rates count.

    Example:
        >>> from slipstream.trace.event import Event
        >>> def run(ranks, seconds):
        ...     one = [Event("iteration", r, 0, 0.0, seconds, {"samples": 8}) for r in range(ranks)]
        ...     return Trace(tuple(one))
        >>> points, what = curve({1: run(1, 0.4), 2: run(2, 0.5)})
        >>> [(point.rate, point.speed_up, point.efficiency) for point in points], what
        ([(20.0, 1.0, 1.0), (32.0, 1.6, 0.8)], 'samples')
    """
    runs = {count: timeline(trace.events) for count, trace in sorted(traces.items())}
    samples = {count: samples_per_second(run) for count, run in runs.items()}
    rates = {count: rate for count, rate in samples.items() if rate is not None}
    what = "samples" if len(rates) == len(runs) else "batches"
    if what == "batches":
        rates = {count: iterations_per_second(run) for count, run in runs.items()}
    fewest = next(iter(rates))
    points = []
    for count, run in runs.items():
        middle, speed_up = typical_iteration(run), rates[count] / rates[fewest]
        points.append(
            Point(
                ranks=count,
                iteration=middle.spread("iteration").median,
                rate=rates[count],
                speed_up=speed_up,
                efficiency=speed_up * fewest / count,
                compute_share=compute_share(middle),
                exposed=middle.spread("exposed").median,
            )
        )
    return points, what


def plot(points: Sequence[Point]) -> Text:
    """The speed-ups as bars; dots reach as far as a linear one would.

    Example:
        >>> print(plot([Point(1, 0.4, 20.0, 1.0, 1.0, 1.0, 0.0),
        ...             Point(2, 0.5, 32.0, 1.6, 0.8, 0.8, 0.1)]))
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
    """The command of a run: each of its ranks has the threads that each of the most ranks has."""
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // most))
    ours = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "slipstream", "launch"]

    def command(folder: Path) -> list[str]:
        files = ["--strategy", str(folder / STRATEGY), "--log-dir", str(folder / "logs")]
        return [*ours, "--nproc", str(count), *files, "--", *words]

    return command


def _trace(outcome: Measurement | Failure, count: int) -> Trace:
    if isinstance(outcome, Measurement):
        return outcome.trace
    fix = {
        "failed": "Mend the script, or see that it runs with this number of ranks.",
        "no trace": "It has to reach the first step to record (--skip) and to call "
        "slipstream.accelerate() without a strategy of its own.",
        "hanging": "Give it more time with --limit, or fewer --steps; see that it calls "
        "slipstream.accelerate() without a strategy of its own.",
    }[outcome.status]
    raise LaunchError(f"the run with --ranks {count}: {outcome.reason}. {fix}")


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _table(points: Sequence[Point], what: str) -> Table:
    name, scale, digits = TimeUnit.of(max(point.iteration for point in points))
    table = Table(title="Scaling on this machine", title_justify="left")
    headings = (f"iteration {name}", f"{what}/s", "speed-up", "efficiency", "compute", "exposed")
    for heading in ("ranks", *headings):
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            str(point.ranks),
            f"{point.iteration * scale:.{digits}f}",
            f"{point.rate:.5g}",
            f"{point.speed_up:.2f}",
            f"{point.efficiency:.1%}",
            f"{point.compute_share:.1%}",
            f"{point.exposed / point.iteration:.1%}" if point.iteration else "-",
        )
    return table


def _remarks(points: Sequence[Point], what: str) -> Iterator[Text]:
    """What one must know to read the numbers."""
    cores, most, fewest = len(os.sched_getaffinity(0)), points[-1].ranks, points[0].ranks
    yield Text(
        f"Efficiency: speed-up over {fewest} rank{'s' * (fewest > 1)} by the ratio of ranks; "
        "linear is 100 %. Compute and exposed exchange: shares of an iteration."
    )
    if most > cores:
        yield Text(
            f"{most} ranks share {cores} cores here: the curve shows that as well.", "yellow"
        )
    if what == "batches":
        yield Text(
            "The traces do not tell samples. The rates count batches: right if a batch is as large "
            "with any number of ranks.",
            "yellow",
        )
