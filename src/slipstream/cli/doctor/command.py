"""``slipstream doctor``: look at hosts and network before training relies on them.

``network`` and ``links`` start the ranks, or become one under a launcher of several; ``measure``
or ``links`` runs on each. ``host`` starts nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from slipstream.cli.doctor.diagnoses import as_json as diagnoses_as_json, draw, exit_code
from slipstream.cli.options import EmulatedRate, check_writable
from slipstream.cli.ranks import (
    describe_hosts,
    launched,
    log_folder,
    on_node,
    run_on_hosts,
    run_on_this_host,
)
from slipstream.errors import ClusterError, LaunchError
from slipstream.files.document import MIB, Unreadable, read_bytes
from slipstream.health.files import HostFiles
from slipstream.health.judge import judge_host
from slipstream.health.nccl import read_nccl_log
from slipstream.health.read import read_host
from slipstream.testbed import Testbed

MEASURE, LINKS = "slipstream.cli.doctor.measure", "slipstream.cli.doctor.links"

LONGEST_LOG = 256 * MIB
Verbose = Annotated[bool, Option("--verbose", "-v", help="List also what is well.")]
Everything = Annotated[bool, Option("--json", help="Print all that was found and read as JSON.")]

app = typer.Typer(no_args_is_help=True)
# The ranks write to stdout.
console = Console(stderr=True)


@app.command()
def host(
    nccl_log: Annotated[
        Path | None,
        Option(metavar="FILE", help="Log of a run with NCCL_DEBUG=INFO: proof of its network."),
    ] = None,
    root: Annotated[
        Path, Option(metavar="DIR", help="Read another host's /proc, /sys and /etc from here.")
    ] = Path("/"),
    verbose: Verbose = False,
    as_json: Everything = False,
) -> None:
    """Look at this host: limits, memory, interfaces; GPUs, RDMA devices and the way between them.

    Reads files and commands that change nothing. Exit code: 0, or 1 if something is wrong.

    [dim]slipstream doctor host[/dim]
    [dim]slipstream doctor host --nccl-log nccl.log --json[/dim]
    """
    log = None if nccl_log is None else read_nccl_log(_text(nccl_log))
    if not (root / "proc").is_dir():
        raise LaunchError(
            f"--root {root}: has no folder proc; name a folder with proc, sys and etc"
        )
    facts = read_host(HostFiles.of(root), log)
    diagnoses = judge_host(facts)
    if as_json:
        print(diagnoses_as_json(diagnoses, facts))
    else:
        Console().print(draw(facts.host, diagnoses, [facts.host], verbose=verbose))
    raise typer.Exit(exit_code(diagnoses))


@app.command()
def links(
    nodes: Annotated[int | None, Option(min=2, help="Emulated hosts to start on.")] = None,
    rate: EmulatedRate = None,
    seconds: Annotated[float, Option(min=0.2, max=60, help="Seconds for a link, about.")] = 1.0,
    verbose: Verbose = False,
    as_json: Everything = False,
) -> None:
    """Look at all hosts, and measure the link between each two of them.

    Names hosts that do not reach each other, slow links, wrong interfaces, and
    what differs between hosts. Start it like a training, on the hosts that will
    train. Exit code: 0, or 1 if something is wrong.

    [dim]slipstream doctor links --nodes 4 --rate 1gbit[/dim]
    [dim]slipstream launch --nnodes 4 ... -m slipstream doctor links[/dim]
    [dim]srun --ntasks-per-node 1 slipstream doctor links[/dim]
    """
    _refuse_without_nodes(nodes, rate=rate)
    job = json.dumps(
        {
            "seconds": seconds,
            "columns": Console().width,
            "as_text": not as_json,
            "verbose": verbose,
        }
    )
    if launched():
        _refuse_both("--nodes", nodes)
        os.execv(sys.executable, [sys.executable, "-m", LINKS, job])  # become that rank
    if nodes is None:
        raise ClusterError(
            "one host has no link: start it on several like a training (slipstream launch --nnodes "
            "4 ... -m slipstream doctor links, srun), or on emulated ones with --nodes 4"
        )
    with Testbed(nodes, rate or "1gbit") as bed:
        code = bed.run(
            [on_node(bed, node, [sys.executable, "-m", LINKS, job]) for node in bed.nodes]
        )
    raise typer.Exit(code)


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
    ranks_per_node: Annotated[
        int | None,
        Option(min=1, help="With --nodes: ranks on each emulated host.", show_default="1"),
    ] = None,
    rate: EmulatedRate = None,
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
    _refuse_without_nodes(nodes, rate=rate, ranks_per_node=ranks_per_node)
    if nodes == 1 and (ranks_per_node or 1) == 1:
        raise ClusterError(
            "--nodes 1 is a single rank, which has no network to measure; start 2 or more, or add "
            "--ranks-per-node 2"
        )
    screen = {"terminal": Console().is_terminal, "columns": Console().width}
    job = json.dumps({"file": str(output), "seconds": seconds, **screen})
    if launched():
        _refuse_both("--nodes", nodes)
        _refuse_both("--ranks", ranks)
        os.execv(sys.executable, [sys.executable, "-m", MEASURE, job])  # become that rank
    if nodes is not None:
        with Testbed(nodes, rate or "1gbit") as bed:
            console.print(describe_hosts(bed))
            code = run_on_hosts(bed, ["-m", MEASURE, job], ranks_per_node or 1, log_folder())
        raise typer.Exit(code)
    if not Console().is_terminal:  # else a bar shows how far it is
        console.print(f"measuring on {ranks or 2} ranks; most of it takes {seconds:.0f} s")
    raise typer.Exit(run_on_this_host(MEASURE, job, ranks or 2, console))


def _refuse_without_nodes(nodes: int | None, **emulated: object) -> None:
    """Refuse options of emulated hosts where there are none."""
    for name, value in emulated.items():
        if value is not None and nodes is None:
            raise ClusterError(
                f"--{name.replace('_', '-')} has no effect without --nodes: it is that of emulated "
                "hosts"
            )


def _refuse_both(option: str, number: int | None) -> None:
    """Refuse an option that starts ranks under a launcher, which has."""
    if number is not None:
        raise ClusterError(
            f"{option} {number} starts ranks, but a launcher has started this one already: leave "
            "out one of the two"
        )


def _text(file: Path) -> str:
    try:
        return read_bytes(file, LONGEST_LOG).decode(errors="replace")
    except (OSError, Unreadable) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"--nccl-log {file}: cannot be read: {reason}") from None
