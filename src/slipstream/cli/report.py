"""``slipstream report``: write one page with traces, findings, predictions and trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from slipstream.advisor.advise import advise
from slipstream.cli.options import check_apart, check_suffix
from slipstream.errors import TraceError
from slipstream.files.write import write_whole
from slipstream.planner.progress.calibration import LossCalibration
from slipstream.report.report import html, png, read_trials
from slipstream.trace import chrome


def report(
    traces: Annotated[list[Path], Argument(help="Traces: .json or .json.gz.")],
    output: Annotated[Path, Option("--output", "-o", help="Page to write.")] = Path("report.html"),
    picture: Annotated[
        Path | None, Option("--png", help="Also write the timelines as a picture.")
    ] = None,
    trials: Annotated[
        Path | None, Option(help="trials.json of [bold]slipstream tune[/bold].")
    ] = None,
    losses: Annotated[
        Path | None,
        Option(help="losses.json of [bold]slipstream tune --to-loss[/bold]: drawn over time."),
    ] = None,
) -> None:
    """Write a page for the browser: timeline, breakdown, findings, predictions and trials.

    The page is one file and needs no network. The traces are compared with the first; predicted
    ones are shown next to the measured runs.

    [bold]slipstream report before/trace.json after/trace.json -o report.html[/bold]

    [bold]slipstream report trace.json --png timeline.png --trials trials.json[/bold]
    """
    check_suffix("--output", output, (".html", ".htm"), device=True)
    check_suffix("--png", picture, (".png",))
    sources: dict[str, str | Path | None] = {"--trials": trials, "--losses": losses}
    sources |= {f"trace {number}": path for number, path in enumerate(traces, 1)}
    check_apart({"--output": output, "--png": picture}, sources)
    named = [(name, chrome.read(path)) for name, path in zip(names(traces), traces, strict=True)]
    measured = [(name, trace) for name, trace in named if not trace.meta.get("predicted")]
    predicted = [(name, trace) for name, trace in named if trace.meta.get("predicted")]
    findings = {name: advise(trace) for name, trace in measured or predicted}
    log = read_trials(trials) if trials else []
    calibration = LossCalibration.load(losses) if losses else None
    shown = html(measured, predicted, findings, log, losses=calibration)
    written = {output: shown.encode()}
    if picture:
        written[picture] = png(measured, predicted)
    for path, content in written.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            reason = f"{path} cannot be written: {error.strerror}; choose another path"
            raise TraceError(reason) from error
        typer.echo(f"{path} ({len(content) / 1e6:.1f} MB)")


def names(paths: Sequence[Path]) -> list[str]:
    """Names of traces: the file's, or the folder's if the file is called ``trace``.

    Example:
        >>> names([Path("before/trace.json"), Path("runs/after.json.gz")])
        ['before', 'after']
    """
    short = []
    for path in paths:
        stem = path.name.removesuffix(".gz").removesuffix(".json")
        short.append((path.resolve().parent.name if stem == "trace" else "") or stem)
    pairs = zip(short, paths, strict=True)
    return [name if short.count(name) == 1 else str(path) for name, path in pairs]
