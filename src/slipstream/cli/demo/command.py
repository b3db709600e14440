"""``slipstream demo``: plain DDP and slipstream train one model in turn, and a table compares them.

Starts the ranks, which run ``training``, and shows their results, which ``report`` draws.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from slipstream.advisor.advise import advise
from slipstream.analysis.summary import summary
from slipstream.cli.demo.report import Measured, plan_table, table, verdict
from slipstream.cli.options import LinkRate, check_writable
from slipstream.cli.ranks import PORT, describe_hosts, run_on_this_host
from slipstream.cli.trace import drawn
from slipstream.errors import LaunchError
from slipstream.planner.cost import NetworkProfile
from slipstream.testbed import Testbed, format_rate, unavailable
from slipstream.trace import chrome

TRAINING = "slipstream.cli.demo.training"
COLUMNS = 100
FILES = {
    "trace.json": "the iterations above, for https://ui.perfetto.dev",
    "cluster.yaml": "what exchanges cost on this network",
    "strategy.yaml": "the plan, for SLIPSTREAM_STRATEGY or --strategy",
    "overview.txt": "the strategy, and what each setting resolved to",
    "demo.json": "every number that was measured",
}


def demo(
    nodes: Annotated[int, Option(min=2, help="Emulated hosts, with one rank each.")] = 4,
    rate: LinkRate = "1gbit",
    steps: Annotated[int, Option(min=2, help="Iterations to time of each training.")] = 50,
    loopback: Annotated[
        bool, Option("--loopback", help="Run the ranks on this host, without slow links.")
    ] = False,
    folder: Annotated[Path, Option(help="Where trace, overview and numbers go.")] = Path(
        "slipstream-demo"
    ),
) -> None:
    """Train an image classifier with plain DDP and with slipstream in turn, and compare them.

    ResNet-18 learns handwritten digits on 4 emulated hosts, joined by links of 1 Gbit/s. Both
    trainings start from one seed, see the same batches, and take turns, an iteration each, in one
    set of processes. First slipstream traces its default, says what slows it down, measures the
    network, and applies the split that it computes; predictions stand next to measurements. This
    takes about three minutes on 2 cores. Where hosts cannot be emulated, the ranks share this one.

    [dim]slipstream demo[/dim]
    [dim]slipstream demo --nodes 2 --rate 300mbit --steps 20[/dim]
    """
    console = Console()
    console.width = min(console.width, COLUMNS)
    bed = Testbed(nodes, rate)  # checks its arguments, before the folder is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--folder {folder} cannot be created: {error}") from error
    check_writable("--folder", folder / "demo.json")
    reason = "--loopback" if loopback else unavailable()
    network = "ranks of this host" if reason else f"hosts at {format_rate(bed.rate)}"
    screen = {"terminal": console.is_terminal, "columns": console.width}
    job = json.dumps({"steps": steps, "folder": str(folder), "network": network, **screen})
    console.print(
        f"ResNet-18 learns handwritten digits: {steps} timed steps, with DDP and with slipstream"
    )
    starting = f"Starting {nodes} ranks ..."
    if reason:
        console.print(Text(f"{nodes} ranks on loopback, no emulated hosts: {reason}"))
        console.print(starting)
        code = run_on_this_host(TRAINING, job, nodes, console)
    else:
        with bed:
            console.print(describe_hosts(bed), starting, sep="\n")
            code = bed.run([_rank_command(job, bed, node.index) for node in bed.nodes])
    if code:
        raise typer.Exit(code)
    _show(console, folder)


def _rank_command(job: str, bed: Testbed, rank: int) -> list[str]:
    # Without a launcher on each host: four more processes that import torch would delay the start.
    meeting = [f"MASTER_ADDR={bed.nodes[0].address}", f"MASTER_PORT={PORT}"]
    place = [f"RANK={rank}", f"WORLD_SIZE={len(bed.nodes)}"]
    return ["env", *place, *meeting, sys.executable, "-m", TRAINING, job]


def _show(console: Console, folder: Path) -> None:
    """Trace, diagnosis and plan; then the table, the verdict and where the files are."""
    measured = Measured.read(folder / "demo.json")
    trace = chrome.read(folder / "trace.json")
    console.rule("1  where an iteration of slipstream's default goes", align="left")
    console.print(summary(trace))
    console.rule("2  diagnosis", align="left")
    network = NetworkProfile.load(folder / "cluster.yaml").groups("world")
    console.print(drawn(advise(trace, network.all_reduce.seconds_of)))
    console.rule("3  the plan, computed from trace and network, and applied", align="left")
    console.print(plan_table(measured), "")
    console.rule("4  plain DDP and slipstream with that plan", align="left")
    console.print(table(measured))
    console.print(Text(verdict(measured), style="bold"))
    console.print(Text(f"\nIn the folder {folder}:"), soft_wrap=True)
    for name, meaning in FILES.items():
        console.print(Text(f"  {name:13} {meaning}"))
