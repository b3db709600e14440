"""``slipstream strategy``: show, list, describe and check strategies, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument

from slipstream.strategy import Strategy, overview, presets

app = typer.Typer(no_args_is_help=True)


@app.command(epilog="Example: slipstream strategy show exact")
def show(
    source: Annotated[
        str | None,
        Argument(
            metavar="[FILE|PRESET]", help="A strategy file or a preset. Default: the defaults."
        ),
    ] = None,
) -> None:
    """Draw the overview table of a strategy."""
    Console().print(overview(Strategy.load(source)))


@app.command("presets", epilog="Example: slipstream strategy presets")
def list_presets() -> None:
    """List the presets: strategies with a name, their settings, and when to choose them."""
    table = Table("preset", "why", "settings")
    for name, preset in presets().items():
        settings = Strategy.load(name).to_yaml().rstrip()
        table.add_row(name, Text(preset.reason), Text(settings), end_section=True)
    Console().print(table)


@app.command(epilog="Example: slipstream strategy schema > strategy.schema.json")
def schema() -> None:
    """Print the JSON schema of a strategy file, for editors that complete and check."""
    typer.echo(json.dumps(Strategy.json_schema(), indent=2))


@app.command(epilog="Example: slipstream strategy check strategy.yaml")
def check(
    file: Annotated[Path, Argument(metavar="FILE", help="A .yaml, .yml or .json file.")],
) -> None:
    """Check a strategy file: print one line if it is valid, else every problem."""
    typer.echo(f"{file}: valid ({Strategy.load(file).exactness})")
