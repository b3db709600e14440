"""``slipstream trace``: look at what a run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.trace import chrome
from slipstream.trace.summary import document
from slipstream.trace.summary import summary as draw

app = typer.Typer(no_args_is_help=True)


@app.command()
def summary(
    file: Annotated[Path, typer.Argument(help="A trace: .json or .json.gz.", show_default=False)],
    rank: Annotated[int | None, typer.Option(help="Only this rank.", show_default=False)] = None,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="A row for each rank, too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same numbers as JSON, in seconds.")
    ] = False,
) -> None:
    """Show where an iteration goes: compute, each exchange and how much of it was hidden.

    [bold]slipstream trace summary trace.json.gz --per-rank[/bold]

    [bold]slipstream trace summary trace.json --json | jq .over_ranks.exposed[/bold]

    The same file opens at https://ui.perfetto.dev.
    """
    trace = chrome.read(file)
    if as_json:
        typer.echo(json.dumps(document(trace, rank), indent=2))
    else:
        Console().print(draw(trace, rank, per_rank=per_rank))
