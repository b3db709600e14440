"""The command ``slipstream``: collects its subcommands, and prints user mistakes in a box."""

from __future__ import annotations

import re
import sys
from errno import EDQUOT, ENOSPC
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer import Option
from typer.main import get_command

from slipstream.cli import autopsy, launch, report, scale, store, strategy, testbed, trace, watch
from slipstream.cli.demo.command import demo
from slipstream.cli.doctor.command import app as doctor
from slipstream.cli.plan.command import plan
from slipstream.cli.tune.command import tune
from slipstream.errors import SlipstreamError
from slipstream.version import __version__

app = typer.Typer(
    name="slipstream",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
SCRIPT_LAST = {"allow_interspersed_args": False}  # options after the script's name are the script's
app.command("launch", context_settings=SCRIPT_LAST)(launch.launch)
app.command("store")(store.store)
app.add_typer(trace.app, name="trace", help="Summarize what a run recorded, and get advice.")
app.add_typer(
    doctor, name="doctor", help="Find what is wrong with hosts and links; measure exchanges."
)
app.command("plan")(plan)
app.command("tune", context_settings=SCRIPT_LAST)(tune)
app.command("scale", context_settings=SCRIPT_LAST)(scale.scale)
app.command("report")(report.report)
app.command("watch", context_settings=SCRIPT_LAST)(watch.watch)
app.command("autopsy")(autopsy.autopsy)
app.add_typer(strategy.app, name="strategy", help="Show, list, describe and check strategies.")
app.add_typer(testbed.app, name="testbed", help="Emulate hosts and slow links on this machine.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback(
    help="Data-parallel training in PyTorch: see where an iteration's time goes, and speed it up."
)
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options before a command."""


def main() -> None:
    """Run the command line; a user mistake prints one red box and exits with code 2."""
    command = get_command(app)
    _let_help_flow(command)
    try:
        command(prog_name="slipstream")  # completion has it in the name of its variable
    except SlipstreamError as error:
        _say(type(error).__name__, str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        _say(type(error).__name__, f"{error.strerror}: free some space, or write to another disk")
        sys.exit(2)


def _let_help_flow(command: Any) -> None:
    """Join the lines of each paragraph: as they are, typer breaks them once more on a terminal
    narrower than the source. Examples, in their tags, stay on lines of their own."""
    command.help = re.sub(r"(?<=[^\s\]])\n(?=[^\s\[])", " ", command.help or "")
    for one in getattr(command, "commands", {}).values():
        _let_help_flow(one)


def _say(title: str, problem: str) -> None:
    box = Panel(Text(problem), title=title, title_align="left", border_style="red")
    Console(stderr=True).print(box)
