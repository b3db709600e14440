"""``slipstream doctor``: measure the network before training relies on it.

Starts the ranks, or becomes one under a launcher; ``measure`` runs on each.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from slipstream.cli.options import LinkRate, RanksPerNode, check_writable
from slipstream.cli.ranks import describe_hosts, log_folder, run_on_hosts, run_on_this_host
from slipstream.cluster.environment import Environment
from slipstream.errors import ClusterError
from slipstream.testbed import Testbed

MEASURE = "slipstream.cli.doctor.measure"

app = typer.Typer(no_args_is_help=True)
# The ranks write to stdout.
console = Console(stderr=True)


@app.command()
def network(
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="YAML file of the numbers.")
    ] = Path("cluster.yaml"),
    ranks: Annotated[
        int | None,
        Option(min=2, help="Ranks to start on this host, without a launcher.", show_default="2"),
    ] = None,
    nodes: Annotated[int | None, Option(help="Emulated hosts to start ranks on, instead.")] = None,
    ranks_per_node: RanksPerNode = 1,
    rate: LinkRate = "1gbit",
    seconds: Annotated[float, Option(min=1, help="Upper limit of the measurement, about.")] = 20.0,
) -> None:
    """Measure all-reduce, reduce-scatter and all-gather from 1 KB to 64 MB; save the numbers.

    Measures among all ranks, inside hosts and across hosts, and how much computing and exchanging
    slow each other. Start it like a training, on the ranks that will train; without a launcher it
    starts its own ranks. Other work on the machines is measured, too: keep them quiet.

    [dim]slipstream doctor network --ranks 4[/dim]
    [dim]slipstream doctor network --nodes 4 --rate 1gbit -o testbed.yaml[/dim]
    [dim]slipstream launch --nproc 4 -m slipstream doctor network[/dim]
    [dim]srun slipstream doctor network -o cluster.yaml[/dim]
    """
    check_writable("--output", output, (".yaml", ".yml"))
    if ranks is not None and nodes is not None:
        raise ClusterError(
            f"--ranks {ranks} starts ranks on this host, --nodes {nodes} on emulated hosts: leave "
            "out one of the two; --ranks-per-node sets the ranks of each emulated host"
        )
    screen = {"terminal": Console().is_terminal, "columns": Console().width}
    job = json.dumps({"file": str(output), "seconds": seconds, **screen})
    if Environment.read(os.environ, socket.gethostname()).source != "none":
        if nodes is not None:
            raise ClusterError(
                f"--nodes {nodes} starts ranks, but a launcher has started this one already: leave "
                "out one of the two"
            )
        os.execv(sys.executable, [sys.executable, "-m", MEASURE, job])  # become that rank
    if nodes is not None:
        with Testbed(nodes, rate) as bed:
            console.print(describe_hosts(bed))
            code = run_on_hosts(bed, ["-m", MEASURE, job], ranks_per_node, log_folder())
        raise typer.Exit(code)
    if not Console().is_terminal:  # else a bar shows how far it is
        console.print(f"measuring on {ranks or 2} ranks; most of it takes {seconds:.0f} s")
    raise typer.Exit(run_on_this_host(MEASURE, job, ranks or 2, console))
