"""``slipstream testbed``: run a script on several emulated hosts with slow links, on one machine.

Refuses a wrong command line before any host is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from slipstream.analysis.compact_table import compact
from slipstream.analysis.time_unit import format_seconds
from slipstream.cli.options import (
    LinkRate,
    LogDir,
    RanksPerNode,
    Script,
    ScriptArgs,
    StrategyOption,
)
from slipstream.cli.ranks import log_folder, run_on_hosts
from slipstream.cluster.launcher import LaunchSpec
from slipstream.strategy import Strategy
from slipstream.testbed import Distance, Testbed, format_rate
from slipstream.testbed.link_check import TOLERANCE

app = typer.Typer(no_args_is_help=True)
# As in `launch`, stdout carries the script's output alone.
console = Console(stderr=True)

_Nodes = Annotated[int, Option(help="Number of hosts.")]
_RoundTrip = Annotated[float, Option(help="Milliseconds there and back, beside the rate.")]
_Loss = Annotated[float, Option(help="Packets that are lost each way, in percent.")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Script,
    args: ScriptArgs = None,
    nodes: _Nodes = 4,
    ranks_per_node: RanksPerNode = 1,
    rate: LinkRate = "1gbit",
    round_trip_ms: _RoundTrip = 0.0,
    loss_percent: _Loss = 0.0,
    strategy: StrategyOption = None,
    log_dir: LogDir = None,
) -> None:
    """Run a script on emulated hosts: separate networks, joined by links of the given rate.

    The links are measured first. Then `slipstream launch` starts the ranks of each host, as on
    real ones. If a host fails, the others are stopped and its exit code is returned.

    [dim]slipstream testbed run --nodes 4 --rate 1gbit -- train.py --steps 20[/dim]
    [dim]slipstream testbed run --nodes 2 --ranks-per-node 2 --rate 300mbit train.py[/dim]
    """
    bed = Testbed(nodes, rate, Distance(round_trip_ms / 1e3, loss_percent / 100))
    LaunchSpec(script=script, nproc=ranks_per_node, log_dir=Path())  # checks the arguments
    if strategy is not None:
        Strategy.load(strategy)
    words = ["--", script, *(args or ())]
    with bed:
        _check(bed)
        code = run_on_hosts(bed, words, ranks_per_node, log_dir or log_folder(), strategy)
    raise typer.Exit(code)


@app.command()
def check(
    nodes: _Nodes = 4,
    rate: LinkRate = "1gbit",
    round_trip_ms: _RoundTrip = 0.0,
    loss_percent: _Loss = 0.0,
) -> None:
    """Measure what the emulated links carry, and run nothing else.

    [dim]slipstream testbed check --nodes 4 --rate 300mbit[/dim]
    [dim]slipstream testbed check --rate 1gbit --round-trip-ms 50 --loss-percent 0.1[/dim]
    """
    with Testbed(nodes, rate, Distance(round_trip_ms / 1e3, loss_percent / 100)) as bed:
        _check(bed)


def _check(bed: Testbed) -> None:
    """Measure the links, draw them, and warn of those that miss the rate."""
    title = f"testbed: links of {format_rate(bed.rate)}"
    if bed.distance.is_long:
        far, lost = bed.distance.round_trip * 1e3, bed.distance.loss
        title += f", round trip {far:g} ms, {lost:.3g} lost each way"
    headings = ("host", "from node0", "to node0", "round trip", "address")
    table = compact(title, *headings, left=["host", "address"])
    table.add_row(bed.nodes[0].name, "", "", "", bed.nodes[0].address)
    checks = bed.check()
    for link in checks:
        there, back = format_rate(link.there), format_rate(link.back)
        trip = format_seconds(link.round_trip)
        table.add_row(link.node.name, there, back, trip, link.node.address)
    console.print(table)
    if bed.distance.is_long:  # what one connection reaches there is its own affair
        return
    for link in checks:
        if (off := link.off(bed.rate)) > TOLERANCE:
            console.print(
                f"warning: the link to {link.node.name} misses the rate by {off:.0%}; "
                "is the machine busy, or the rate more than its cores can move?",
                style="yellow",
            )
