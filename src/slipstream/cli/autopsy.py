"""``slipstream autopsy``: why a run hung, from what its ranks have left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from typer import Argument

from slipstream.analysis.compact_table import compact
from slipstream.checks.autopsy import Autopsy, by_stack, ranks_named
from slipstream.cli.options import AsJson

AutopsyFolder = Annotated[Path, Argument(help="The folder that the error named: checks.folder.")]


def autopsy(
    folder: AutopsyFolder = Path("slipstream-autopsy"),
    as_json: AsJson = False,
) -> None:
    """Show why a run hung: whom the others waited for, and where each rank was.

    [bold]slipstream autopsy slipstream-autopsy[/bold]

    Reads what the ranks of a run have left, also of one that was killed before it had a verdict.
    """
    found = Autopsy.read(folder)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    console = Console()
    console.print(Text(found.verdict, style="bold"))
    console.print(Text(f"Looked at because {found.reason}.", style="dim"))
    console.print()
    table = compact("", "rank", "host", "updates", "at", "waits in", "still", left=["host", "at"])
    for rank, case in sorted(found.cases.items()):
        state, mark = case.state, " *" if rank in found.blamed else ""
        at = state.ended or state.line
        still = f"{state.still:.0f} s"
        updates = "" if state.step is None else str(state.step)
        table.add_row(f"{rank}{mark}", state.host, updates, at, state.exchange, still)
    console.print(table)
    for ranks, stack in by_stack(case for case in found.cases.values() if case.stacks):
        console.print(Text(f"\n{ranks_named(ranks)}, the innermost call last:", style="bold"))
        console.print(Padding(Text("\n".join(stack)), (0, 0, 0, 2)))
    for rank, case in sorted(found.cases.items()):
        if last := case.exchanges or [*map(str, case.collectives)]:
            console.print(Text(f"\nThe last exchanges of rank {rank}:", style="bold"))
            console.print(Padding(Text("\n".join(last[-5:])), (0, 0, 0, 2)))
