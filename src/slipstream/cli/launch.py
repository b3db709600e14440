"""``slipstream launch``: start a script's ranks, show what was started, and what went wrong."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slipstream.cluster.launcher import LaunchSpec, RankFailure, run
from slipstream.errors import LaunchError
from slipstream.strategy import Strategy, overview
from slipstream.version import __version__

# Everything but rank 0's output goes to stderr, so that the script's stdout can be piped.
console = Console(stderr=True)


def launch(
    script: Annotated[str, typer.Argument(help="Python file to run (a module with -m).")],
    args: Annotated[
        list[str] | None, typer.Argument(help="All that follows goes to the script untouched.")
    ] = None,
    nproc: Annotated[
        str, typer.Option(metavar="N|gpu", help="Ranks on this node; gpu = one a GPU.")
    ] = "1",
    nnodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(help="Rank of this node, from 0; default: the rendezvous ranks the nodes."),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: on node 0.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="How often to restart failed ranks.")] = 0,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder of the logs; default: slipstream-logs/TIME.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PRESET",
            envvar="SLIPSTREAM_STRATEGY",
            help="Strategy of the ranks; checked before any starts.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module.")] = False,
) -> None:
    """Run a script on several ranks of this machine, or on this node of several.

    Options come before the script. Rank 0's output is shown as it comes; each rank has a log.
    If a rank fails, the others are stopped, its traceback is shown, and its exit code returned.

    [dim]slipstream launch --nproc 2 train.py --epochs 3[/dim]
    [dim]slipstream launch --nproc gpu --strategy strategy.yaml -m my.training[/dim]
    [dim]slipstream launch --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 train.py[/dim]
    """
    config = None if strategy is None else Strategy.load(strategy)
    spec = LaunchSpec(
        script=script,
        args=tuple(args or ()),
        module=module,
        nproc=(ranks := _rank_count(nproc)),
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
        log_dir=log_dir or Path("slipstream-logs", f"{time.strftime('%F_%H-%M-%S')}-{os.getpid()}"),
        variables=_variables(ranks, strategy),
    )
    if spec.node_rank in (None, 0):
        console.print(_environment(spec))
        if config is not None:
            console.print(overview(config))
    outcome = run(spec)
    if outcome.failure is not None:
        console.print(_failure(outcome.failure))
    elif outcome.exit_code:
        console.print(f"stopped by signal {outcome.exit_code - 128}: no rank is left running")
    if spec.node_rank in (None, 0) or outcome.exit_code:
        console.print(Text(f"logs: {spec.log_dir.resolve()}"), soft_wrap=True)
    raise typer.Exit(outcome.exit_code)


def _rank_count(nproc: str) -> int:
    if nproc.isdecimal():
        return int(nproc)
    if nproc != "gpu":
        raise LaunchError(f"--nproc {nproc!r}: must be a number, or gpu for one rank a GPU")
    import torch

    if not torch.cuda.is_available():
        raise LaunchError("--nproc gpu: torch sees no GPU here; give a number of ranks")
    return torch.cuda.device_count()


def _variables(nproc: int, strategy: str | None) -> dict[str, str]:
    """Variables of every rank: threads that share the cores evenly, and where the strategy is."""
    cores = len(os.sched_getaffinity(0))
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // max(nproc, 1)))
    }
    if strategy is not None:
        path = Path(strategy)
        variables["SLIPSTREAM_STRATEGY"] = str(path.resolve()) if path.is_file() else strategy
    return variables


def _environment(spec: LaunchSpec) -> Panel:
    import torch

    table = Table.grid(padding=(0, 2))
    for name, value in {
        "slipstream": __version__,
        "torch": version("torch"),
        "nodes": spec.nnodes,
        "ranks per node": spec.nproc,
        "world size": spec.nnodes * spec.nproc,
        "backend": "gloo, nccl on GPUs" if torch.cuda.is_available() else "gloo (no GPU here)",
        "rendezvous": spec.rendezvous,
        "threads per rank": spec.variables["OMP_NUM_THREADS"],
        "restarts": spec.max_restarts,
        "logs": spec.log_dir,
    }.items():
        table.add_row(Text(name, style="bold"), Text(str(value), overflow="fold"))
    return Panel(table, title="distributed environment", title_align="left", expand=False)


def _failure(failure: RankFailure) -> Panel:
    facts = (
        f"rank {failure.rank} (local rank {failure.local_rank}) on host {failure.host} "
        f"{failure.cause}"
    )
    log = Text(f"log: {failure.log}", overflow="fold")
    return Panel(
        Group(Text(facts, style="bold"), log, Text(), Text(failure.excerpt(), overflow="fold")),
        title=f"rank {failure.rank} failed first",
        title_align="left",
        border_style="red",
    )
