"""``slipstream demo``: plain DDP and slipstream train one model in turn, a table compares.

Never trains itself: ``_demo_training`` does, on every rank; ``_demo_report`` draws what came out.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.advisor.advise import advise
from slipstream.analysis.summary import summary
from slipstream.cli.demo.report import Measured, plan_table, table, verdict
from slipstream.cli.trace import drawn
from slipstream.cluster.launcher import LaunchSpec, run
from slipstream.errors import LaunchError
from slipstream.planner.cost import NetworkProfile
from slipstream.testbed import Testbed, format_rate, unavailable
from slipstream.trace import chrome

TRAINING = "slipstream.cli.demo.training"
PORT = 29500
COLUMNS = 100
NEEDED = {"transformers": "transformers", "sklearn": "scikit-learn"}


@dataclass(frozen=True)
class Job:
    """What every rank is told, as JSON in its one argument."""

    steps: int
    folder: str
    examples: str
    network: str
    terminal: bool
    columns: int


def demo(
    nodes: Annotated[int, typer.Option(min=2, help="Number of emulated hosts, a rank each.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link: 300mbit, 1gbit ...")] = "1gbit",
    steps: Annotated[int, typer.Option(min=2, help="Iterations to time, of each.")] = 50,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Ranks on this host, no emulated links.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where trace, overview and numbers go.")] = Path(
        "slipstream-demo"
    ),
) -> None:
    """Train an image classifier with plain DDP and with slipstream in turn, and compare them.

    ResNet-18 learns handwritten digits on 4 emulated hosts, joined by links of 1 Gbit/s. Both start
    from one seed, see the same batches, and take turns, an iteration each, in one set of processes.
    First slipstream traces its default, says what slows it down, measures the network, and applies
    the split that it computes; predictions stand next to measurements. Takes about three minutes on
    2 cores. Where hosts cannot be emulated, the ranks share this one.

    [dim]slipstream demo[/dim]
    [dim]slipstream demo --nodes 2 --rate 300mbit --steps 20[/dim]
    """
    console = Console()
    console.width = min(console.width, COLUMNS)
    bed = Testbed(nodes, rate)  # first, for it checks its arguments
    examples = _find_examples()
    _check_packages()
    _make(folder)
    reason = "--loopback" if loopback else unavailable()
    network = "ranks of this host" if reason else f"hosts at {format_rate(bed.rate)}"
    job = Job(steps, str(folder), str(examples), network, console.is_terminal, console.width)
    console.print(
        f"ResNet-18 learns handwritten digits: {steps} timed steps, with DDP and with slipstream"
    )
    if reason:
        console.print(Text(f"{nodes} ranks on loopback, no emulated hosts: {reason}"))
        code = _on_loopback(console, job, nodes)
    else:
        code = _on_hosts(console, job, bed)
    if code:
        raise typer.Exit(code)
    _show(console, folder)


def _on_hosts(console: Console, job: Job, bed: Testbed) -> int:
    with bed:
        link = bed.check()[0]
        console.print(
            f"{len(bed.nodes)} emulated hosts, links of {format_rate(bed.rate)}; "
            f"{link.node.name} reads {format_rate(link.there)}, round trip "
            f"{link.round_trip * 1e6:.0f} us"
        )
        return bed.run([_rank_command(job, bed, node.index) for node in bed.nodes])


def _rank_command(job: Job, bed: Testbed, rank: int) -> list[str]:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": len(bed.nodes),
        "MASTER_ADDR": bed.nodes[0].address,
        "MASTER_PORT": PORT,
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, sys.executable, "-m", TRAINING, json.dumps(asdict(job))]


def _on_loopback(console: Console, job: Job, ranks: int) -> int:
    spec = LaunchSpec(
        script=TRAINING,
        module=True,
        args=(json.dumps(asdict(job)),),
        nproc=ranks,
        log_dir=Path(job.folder, "logs"),
        variables={"OMP_NUM_THREADS": "1"},
    )
    outcome = run(spec)
    if failure := outcome.failure:
        seen = "" if failure.rank == 0 else f":\n{failure.excerpt()}"  # rank 0's output is shown
        console.print(Text(f"rank {failure.rank} {failure.cause}{seen}"))
    return outcome.exit_code


def _show(console: Console, folder: Path) -> None:
    """Trace, diagnosis, plan, then the table, the verdict and where all of it is."""
    measured = Measured.read(folder / "demo.json")
    trace = chrome.read(folder / "trace.json")
    console.rule("1  where an iteration of slipstream's default goes", align="left")
    console.print(summary(trace))
    console.rule("2  diagnosis", align="left")
    network = NetworkProfile.load(folder / "cluster.yaml").network("world")
    console.print(drawn(advise(trace, network.all_reduce.seconds_of)))
    console.rule(
        "3  the plan, computed from this trace and this network, and applied", align="left"
    )
    console.print(plan_table(measured), "")
    console.rule("4  plain DDP and slipstream with that plan", align="left")
    console.print(table(measured))
    console.print(Text(verdict(measured), style="bold"))
    notes = {
        "trace.json": "the iterations above, for https://ui.perfetto.dev",
        "cluster.yaml": "what exchanges cost on this network",
        "strategy.yaml": "the plan, for SLIPSTREAM_STRATEGY or --strategy",
        "overview.txt": "the strategy, and what became of it",
        "demo.json": "every number that was measured",
    }
    console.print(Text(f"\nIn the folder {folder}:"), soft_wrap=True)
    for name, what in notes.items():
        console.print(Text(f"  {name:13} {what}"))


def _find_examples() -> Path:
    """The folder of the examples' data: in the installed package, or beside ``src``."""
    installed = Path(__file__).with_name("_examples")
    checkout = Path(__file__).parents[3] / "examples"
    for folder in (installed, checkout):
        if (folder / "data.py").is_file():
            return folder
    raise LaunchError(
        f"data.py of the examples is neither in {installed} nor in {checkout}; install slipstream "
        "again, or run the demo from a complete checkout"
    )


def _check_packages() -> None:
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        raise LaunchError(
            f"the demo needs {' and '.join(missing)}: in the checkout, pip install '.[examples]'"
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--folder {folder} cannot be made: {error}; choose another") from error
    if not os.access(folder, os.W_OK):
        raise LaunchError(f"--folder {folder} cannot be written; choose another")
