"""``slipstream demo``: DDP and slipstream, exact and lossy, train one model in turn.

Starts the ranks, which run ``training``, and shows their result, which ``report`` draws.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from slipstream.advisor.advise import advise
from slipstream.cli.demo.measured import EXACT, Measured
from slipstream.cli.demo.report import alternation, result
from slipstream.cli.options import check_writable
from slipstream.cli.ranks import PORT, describe_hosts, run_on_this_host
from slipstream.errors import LaunchError, TraceError
from slipstream.files.write import write_whole
from slipstream.planner.network.profile import NetworkProfile
from slipstream.report.report import html
from slipstream.testbed import Testbed, format_rate, unavailable
from slipstream.trace import chrome

TRAINING = "slipstream.cli.demo.training"
COLUMNS = 100
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""glibc keeps what a rank frees. Else every iteration asks for its pages anew, 32 MB of them, and
the one that runs after a wait pays for it."""
FILES = {
    "report.html": "all of it and more, for a browser",
    "trace.json": "iterations of the exact training, for https://ui.perfetto.dev",
    "cluster.yaml": "what exchanges cost on this network",
    "exact.yaml": "what slipstream chose, for SLIPSTREAM_STRATEGY or --strategy",
    "lossy.yaml": "the same with the codec",
    "local.yaml": "ranks that meet rarely instead",
    "overview.txt": "the strategy, and what each setting resolved to",
    "demo.json": "every number that was measured",
}


def demo(
    nodes: Annotated[int, Option(min=2, help="Emulated hosts, with one rank each.")] = 4,
    rate: Annotated[
        str | None,
        Option(
            help="Rate of each emulated host's link: 300mbit, 1gbit, 2.5gbit.",
            show_default="1gbit",
        ),
    ] = None,
    steps: Annotated[int, Option(min=2, help="Iterations to time of each training.")] = 20,
    loopback: Annotated[
        bool, Option("--loopback", help="Run the ranks on this host, without slow links.")
    ] = False,
    folder: Annotated[Path, Option(help="Where report, trace and numbers go.")] = Path(
        "slipstream-demo"
    ),
) -> None:
    """Train an image classifier with DDP and with slipstream, exact and lossy, in turn.

    ResNet-18 learns handwritten digits on 4 emulated hosts, joined by links
    of 1 Gbit/s. slipstream tries transports and splits in its first updates,
    DDP bucket sizes; network and codecs are measured, and the planner picks a
    codec if one pays; another training lets ranks train apart and meet, a
    tenth of the model at a time. Then all go on from the same weights, see
    the same batches and take turns, an iteration each. The first line of the
    result is the gain. About four minutes on 2 cores. Where hosts cannot be emulated,
    the ranks share this one.

    [dim]slipstream demo[/dim]
    [dim]slipstream demo --nodes 2 --rate 300mbit --steps 10[/dim]
    [dim]slipstream demo --loopback --folder demo-here[/dim]
    """
    console = Console()
    console.width = min(console.width, COLUMNS)
    if loopback and rate is not None:
        raise LaunchError("--rate has no effect with --loopback, which has no emulated links")
    bed = Testbed(nodes, rate or "1gbit")  # checks its arguments, before the folder is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--folder {folder} cannot be created: {error.strerror}") from error
    check_writable("--folder", folder / "demo.json")
    reason = "--loopback" if loopback else unavailable()
    network = "ranks of this host" if reason else f"hosts at {format_rate(bed.rate)}"
    screen = {"terminal": console.is_terminal, "columns": console.width}
    job = json.dumps({"steps": steps, "folder": str(folder), "network": network, **screen})
    cores = len(os.sched_getaffinity(0))
    console.print(f"ResNet-18 learns handwritten digits; {nodes} ranks share {cores} cores")
    starting = f"Starting {nodes} ranks ..."
    if reason:
        console.print(Text(f"{nodes} ranks on loopback, no emulated hosts: {reason}"))
        console.print(starting)
        code = run_on_this_host(TRAINING, job, nodes, console)
    else:
        with bed:
            console.print(describe_hosts(bed), starting, sep="\n")
            code = bed.run([_rank_command(job, bed, node.index) for node in bed.nodes], KEEP_MEMORY)
    if code:
        raise typer.Exit(code)
    _show(console, folder)


def _rank_command(job: str, bed: Testbed, rank: int) -> list[str]:
    # Without a launcher on each host: four more processes that import torch would delay the start.
    meeting = [f"MASTER_ADDR={bed.nodes[0].address}", f"MASTER_PORT={PORT}"]
    place = [f"RANK={rank}", f"WORLD_SIZE={len(bed.nodes)}"]
    return ["env", *place, *meeting, sys.executable, "-m", TRAINING, job]


def _show(console: Console, folder: Path) -> None:
    """The result, and where the files are."""
    measured = Measured.read(folder / "demo.json")
    console.print(result(measured, console.width))
    try:
        _write_page(folder, measured)
    except TraceError as error:
        console.print(Text(f"\nreport.html is not written: {error}"))
    console.print(Text(f"\nIn the folder {folder}:"), soft_wrap=True)
    for name, meaning in FILES.items():
        if (folder / name).exists():
            console.print(Text(f"  {name:13} {meaning}"))
    if not measured.is_exact:
        raise typer.Exit(1)


def _write_page(folder: Path, measured: Measured) -> None:
    """``report.html``: the trainings in turn, then the trace of the exact one.

    Raises:
        TraceError: plotly is not installed.
    """
    trace = chrome.read(folder / "trace.json")
    findings = {EXACT: advise(trace, NetworkProfile.load(folder / "cluster.yaml"))}
    page = html([(EXACT, trace)], findings=findings, alternation=alternation(measured))
    write_whole(folder / "report.html", page)
