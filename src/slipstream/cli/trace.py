"""``slipstream trace``: summarize a recorded run, and advise what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text
from typer import Argument, Option

from slipstream.advisor.advise import advise as find
from slipstream.advisor.findings import Finding
from slipstream.analysis.summary import document, summary as draw
from slipstream.analysis.time_unit import format_seconds
from slipstream.cli.options import AsJson
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy.yaml import format_yaml
from slipstream.trace import chrome

app = typer.Typer(no_args_is_help=True)

COLOURS = {"good": "green", "note": "cyan", "warning": "yellow", "problem": "red"}

File = Annotated[Path, Argument(help="A trace: .json or .json.gz.")]


@app.command()
def summary(
    file: File,
    rank: Annotated[int | None, Option(help="Show this rank alone.")] = None,
    per_rank: Annotated[
        bool, Option("--per-rank", help="Add a table with a row for each rank.")
    ] = False,
    baseline: Annotated[
        Path | None,
        Option(
            metavar="TRACE",
            help="Trace of the same training on one rank: adds the scaling efficiency.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where an iteration's time goes: compute, and each exchange and how much of it is hidden.

    [bold]slipstream trace summary trace.json.gz --per-rank[/bold]

    [bold]slipstream trace summary trace.json --baseline one-rank/trace.json[/bold]

    [bold]slipstream trace summary trace.json --json | jq .over_ranks.exposed[/bold]

    The same file opens at https://ui.perfetto.dev.
    """
    trace = chrome.read(file)
    one = None if baseline is None else chrome.read(baseline)
    if as_json:
        typer.echo(json.dumps(document(trace, rank, baseline=one), indent=2))
    else:
        Console().print(draw(trace, rank, per_rank=per_rank, baseline=one))


@app.command()
def advise(
    file: File,
    cluster: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="cluster.yaml of `slipstream doctor network`. Default: the costs in the trace.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what slows an iteration down, what to change, and how much that should gain.

    Gains of another exchange are those that `slipstream plan` predicts. Each is for its finding
    alone; they do not add up. Copy the lines under "strategy" into the strategy file; if two
    findings change the same key, take the first.

    [bold]slipstream trace advise trace.json[/bold]

    [bold]slipstream trace advise trace.json --cluster cluster.yaml[/bold]
    """
    trace = chrome.read(file)
    findings = find(trace, None if cluster is None else _network(cluster))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(drawn(findings))


def drawn(findings: Sequence[Finding]) -> Group:
    """Draw findings for a terminal, one below the other."""
    return Group(*(Padding(_drawn(finding), (0, 0, 1, 0)) for finding in findings))


def _drawn(finding: Finding) -> Group:
    head = Text(finding.severity, style=f"bold {COLOURS[finding.severity]}")
    head.append(f"  {finding.where}", style="bold not dim")
    if finding.gain:
        head.append(f"  up to {format_seconds(finding.gain)} an iteration", style="not bold")
    lines = [Text(finding.evidence), Text(finding.advice)]
    if finding.patch:
        lines += [Text("strategy:"), Text(format_yaml(finding.patch).rstrip(), style="cyan")]
    return Group(head, *(Padding(line, (0, 0, 0, 2)) for line in lines))


def _network(path: Path) -> NetworkProfile:
    """Read the measured network; warn of doubts about it."""
    cluster = NetworkProfile.load(path)
    for doubt in cluster.doubts:
        Console(stderr=True).print(Text(f"warning: {path}: {doubt}"), style="yellow")
    return cluster
