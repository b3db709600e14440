"""``slipstream doctor``: measure what the machines give before training relies on it.

Never measures itself: ``_doctor_measure`` does, on every rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cluster.environment import Environment
from slipstream.cluster.launcher import LaunchSpec, run
from slipstream.errors import ClusterError
from slipstream.testbed import Testbed, format_rate

MEASURE = "slipstream.cli.doctor.measure"
PORT = 29500

app = typer.Typer(no_args_is_help=True)
# stdout is the ranks'.
console = Console(stderr=True)


@dataclass(frozen=True)
class Job:
    """What every rank is told, as JSON in its one argument."""

    file: str
    seconds: float
    terminal: bool
    columns: int


@app.command()
def network(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the numbers go, as YAML.")
    ] = Path("cluster.yaml"),
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2, help="Ranks to start on this host, if no launcher has.", show_default="2"
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Start them on so many emulated hosts instead.", show_default=False),
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Of each emulated host.")] = 1,
    rate: Annotated[
        str, typer.Option(help="Of each emulated host's link: 300mbit, 1gbit ...")
    ] = "1gbit",
    seconds: Annotated[
        float, typer.Option(min=1, help="About the longest that exchanges are measured.")
    ] = 20.0,
) -> None:
    """Measure all-reduce, reduce-scatter and all-gather of 1 KB to 64 MB, and save the numbers.

    Among all ranks, inside hosts and across hosts; and how much computing and exchanging slow each
    other. Start it like a training, on the ranks that will train; alone it starts its own ranks.
    Anything else that runs meanwhile is measured, too.

    [dim]slipstream doctor network --ranks 4[/dim]
    [dim]slipstream doctor network --nodes 4 --rate 1gbit -o testbed.yaml[/dim]
    [dim]slipstream launch --nproc 4 -m slipstream doctor network[/dim]
    [dim]srun slipstream doctor network -o cluster.yaml[/dim]
    """
    _check_output(output)
    if ranks is not None and nodes is not None:
        raise ClusterError(
            f"--ranks {ranks} are for this host, --nodes {nodes} for emulated ones: leave out one "
            "of the two; --ranks-per-node says how many each emulated host has"
        )
    screen = Console()
    job = json.dumps(asdict(Job(str(output), seconds, screen.is_terminal, screen.width)))
    if Environment.read(os.environ, socket.gethostname()).source != "none":
        if nodes is not None:
            raise ClusterError(
                f"--nodes {nodes} would start hosts, but a launcher has started this rank: leave "
                "out one of the two"
            )
        os.execv(sys.executable, [sys.executable, "-m", MEASURE, job])  # this becomes the rank
    if nodes is not None:
        raise typer.Exit(_on_hosts(Testbed(nodes, rate), ranks_per_node, job))
    raise typer.Exit(_on_this_host(ranks or 2, job))


def _on_this_host(ranks: int, job: str) -> int:
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory(prefix="slipstream-doctor-") as folder:
        outcome = run(
            LaunchSpec(
                script=MEASURE,
                module=True,
                args=(job,),
                nproc=ranks,
                log_dir=Path(folder),
                variables={"OMP_NUM_THREADS": str(threads)},
            )
        )
        if failure := outcome.failure:
            seen = "" if failure.rank == 0 else f":\n{failure.excerpt()}"  # rank 0's is shown
            console.print(Text(f"rank {failure.rank} {failure.cause}{seen}"))
    return outcome.exit_code


def _on_hosts(bed: Testbed, ranks_per_node: int, job: str) -> int:
    logs = Path("slipstream-logs", f"{time.strftime('%F_%H-%M-%S')}-{os.getpid()}")
    options = {
        "--nnodes": len(bed.nodes),
        "--nproc": ranks_per_node,
        "--rdzv-endpoint": f"{bed.nodes[0].address}:{PORT}",
        "--log-dir": logs,
    }
    words = [str(word) for option in options.items() for word in option]
    launch = [sys.executable, "-m", "slipstream", "launch", *words]
    with bed:
        link = bed.check()[0]
        console.print(
            f"{len(bed.nodes)} emulated hosts, links of {format_rate(bed.rate)}; {link.node.name} "
            f"reads {format_rate(link.there)}, round trip {link.round_trip * 1e6:.0f} us"
        )
        return bed.run(
            [[*launch, "--node-rank", str(node.index), "-m", MEASURE, job] for node in bed.nodes]
        )


def _check_output(output: Path) -> None:
    """Find out before the measurement that its numbers cannot be written."""
    if output.suffix.lower() not in (".yaml", ".yml"):
        raise ClusterError(f"--output {output}: such a file ends in .yaml or .yml; rename it")
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK) or output.is_dir():
        raise ClusterError(f"--output {output}: cannot be written; choose another place")
