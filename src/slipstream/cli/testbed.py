"""The command ``slipstream testbed``: try a script on several hosts and slow links, on one machine.

Never builds anything for a command line that is wrong: that is found first.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cluster.launcher import LaunchSpec
from slipstream.strategy import Strategy
from slipstream.testbed import Testbed, format_rate
from slipstream.testbed.link_check import TOLERANCE

PORT = 29500

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
# Like `launch`: stdout is the script's.
console = Console(stderr=True)

Nodes = Annotated[int, typer.Option(help="Number of hosts.")]
Rate = Annotated[str, typer.Option(help="Of each link, both ways: 300mbit, 1gbit, 2.5gbit ...")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="Python file to run on every host.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="All that follows goes to the script untouched.")
    ] = None,
    nodes: Nodes = 4,
    ranks_per_node: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    rate: Rate = "1gbit",
    strategy: Annotated[
        str | None, typer.Option(metavar="FILE|PRESET", help="Strategy of the ranks.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder of the logs; default: slipstream-logs/TIME.")
    ] = None,
) -> None:
    """Run a script on emulated hosts: separate networks, joined by links of the given rate.

    The links are measured first. Then `slipstream launch` starts the ranks of each host, as it does
    on real ones. If a host fails, the others are stopped and its exit code is returned.

    [dim]slipstream testbed run --nodes 4 --rate 1gbit -- train.py --steps 20[/dim]
    [dim]slipstream testbed run --nodes 2 --ranks-per-node 2 --rate 300mbit train.py[/dim]
    """
    bed = Testbed(nodes, rate)
    spec = LaunchSpec(
        script=script,
        args=tuple(args or ()),
        nproc=ranks_per_node,
        nnodes=nodes,
        node_rank=0,
        rdzv_endpoint=f"{bed.nodes[0].address}:{PORT}",
        log_dir=log_dir or Path("slipstream-logs", f"{time.strftime('%F_%H-%M-%S')}-{os.getpid()}"),
    )
    if strategy is not None:
        Strategy.load(strategy)
    with bed:
        _check(bed)
        code = bed.run([_launch(spec, node.index, strategy) for node in bed.nodes])
    raise typer.Exit(code)


@app.command()
def check(nodes: Nodes = 4, rate: Rate = "1gbit") -> None:
    """Measure what the emulated links carry, and run nothing else.

    [dim]slipstream testbed check --nodes 4 --rate 300mbit[/dim]
    """
    with Testbed(nodes, rate) as bed:
        _check(bed)


def _launch(spec: LaunchSpec, node: int, strategy: str | None) -> list[str]:
    """The command that starts the ranks of one node."""
    options = {
        "--nnodes": spec.nnodes,
        "--node-rank": node,
        "--nproc": spec.nproc,
        "--rdzv-endpoint": spec.rdzv_endpoint,
        "--log-dir": spec.log_dir,
    } | ({} if strategy is None else {"--strategy": strategy})
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "slipstream", "launch", *words, "--", spec.script, *spec.args]


def _check(bed: Testbed) -> None:
    """Measure the links, draw them, and warn of those that are off."""
    table = Table(title=f"testbed: links of {format_rate(bed.rate)}", title_justify="left")
    for heading in ("host", "address", "from node0", "to node0", "round trip"):
        table.add_column(heading, justify="left" if heading in ("host", "address") else "right")
    table.add_row(bed.nodes[0].name, bed.nodes[0].address)
    checks = bed.check()
    for link in checks:
        there, back = format_rate(link.there), format_rate(link.back)
        trip = f"{link.round_trip * 1e6:.0f} us"
        table.add_row(link.node.name, link.node.address, there, back, trip)
    console.print(table)
    for link in checks:
        if (off := link.off(bed.rate)) > TOLERANCE:
            console.print(
                f"warning: the link to {link.node.name} is {off:.0%} off the rate asked for; "
                "is the machine busy, or the rate more than its cores can move?",
                style="yellow",
            )
