"""``slipstream launch``: start the ranks of a script, and show which rank failed and why."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from slipstream.cli.islands import run_islands
from slipstream.cli.options import LogDir, ScriptArgs, StrategyOption
from slipstream.cli.ranks import log_folder, threads_per_rank
from slipstream.cluster.launcher import LaunchSpec, Outcome, RankFailure, run
from slipstream.errors import LaunchError
from slipstream.strategy import Strategy
from slipstream.tuner.own_strategy import own_strategy
from slipstream.version import __version__

# stdout carries rank 0's output alone, so that it can be piped.
console = Console(stderr=True)
OWN_OPTIONS = ("--nproc", "--nnodes", "--node-rank", "--rdzv-endpoint", "--strategy")
"""Without one of these another run would train than was meant."""


def launch(
    script: Annotated[str, Argument(help="Python file to run (a module with -m).")],
    args: ScriptArgs = None,
    nproc: Annotated[
        str, Option(metavar="N|gpu", help="Ranks on this node; gpu: one for each GPU.")
    ] = "1",
    nnodes: Annotated[int, Option(help="Number of nodes.")] = 1,
    node_rank: Annotated[
        int | None, Option(help="Index of this node, from 0. By default the rendezvous assigns it.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="Where the nodes meet: on node 0, or at a store."),
    ] = None,
    max_restarts: Annotated[int, Option(help="Restarts of the ranks after a failure.")] = 0,
    islands: Annotated[
        int | None,
        Option(min=1, help="Jobs of one rank each that come and go (local.rendezvous)."),
    ] = None,
    log_dir: LogDir = None,
    strategy: StrategyOption = None,
    module: Annotated[bool, Option("--module", "-m", help="SCRIPT is a module.")] = False,
) -> None:
    """Run a script on several ranks of this machine, or on this node of several.

    Options come before the script. Rank 0's output is shown as it comes; each rank has a log.
    If a rank fails, the others are stopped, its traceback is shown, and its exit code is returned.

    [dim]slipstream launch --nproc 2 train.py --epochs 3[/dim]
    [dim]slipstream launch --nproc gpu --strategy strategy.yaml -m my.training[/dim]
    [dim]slipstream launch --islands 4 --max-restarts 9 --strategy local.yaml train.py[/dim]
    [dim]slipstream launch --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 train.py[/dim]
    """
    if islands is not None:
        _refuse_with_islands(nproc, nnodes, node_rank, rdzv_endpoint)
        code = run_islands(
            [script, *(args or ())],
            islands,
            module=module,
            strategy=strategy,
            restarts=max_restarts,
            log_dir=log_dir or log_folder(),
            console=console,
        )
        raise typer.Exit(code)
    ranks = _rank_count(nproc)
    variables = {"OMP_NUM_THREADS": threads_per_rank(ranks)}
    if strategy is not None:
        Strategy.load(strategy)  # a mistake is told before any rank starts
        path = Path(strategy)
        variables["SLIPSTREAM_STRATEGY"] = str(path.resolve()) if path.is_file() else strategy
    spec = LaunchSpec(
        script=script,
        args=tuple(args or ()),
        module=module,
        nproc=ranks,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        max_restarts=max_restarts,
        log_dir=log_dir or log_folder(),
        variables=variables,
    )
    _import_torch_quietly()
    _show_start(spec, strategy)
    outcome = run(spec, _say_restart)
    _show_end(spec, outcome)
    raise typer.Exit(outcome.exit_code)


def _show_start(spec: LaunchSpec, strategy: str | None) -> None:
    """Print on the first node where the ranks run, and under which strategy."""
    if spec.node_rank not in (None, 0):
        return
    console.print(_environment(spec))
    if strategy is not None:
        shown = f"strategy: {strategy} (slipstream strategy show {strategy})"
        console.print(Text(shown), soft_wrap=True)
        if not spec.module and (hidden := own_strategy(spec.script)):
            console.print(Text(f"warning: {hidden}"), style="yellow", soft_wrap=True)
    if not spec.module and (late := options_behind(spec.script, spec.args)):
        words = f"warning: {spec.script} gets {', '.join(late)}, which it does not name"
        text = Text(f"{words}; options of launch come before the script")
        console.print(text, style="yellow", soft_wrap=True)


def _show_end(spec: LaunchSpec, outcome: Outcome) -> None:
    """Print what ended the ranks, unless they are done, and where their logs are."""
    if outcome.failure is not None:
        console.print(_failure(outcome.failure))
    elif outcome.exit_code == 1:
        console.print("a rank of another node has failed, and no restart is left")
    elif outcome.exit_code:
        console.print(f"stopped by signal {outcome.exit_code - 128}: no rank is left running")
    if spec.node_rank in (None, 0) or outcome.exit_code:
        console.print(Text(f"logs: {spec.log_dir.resolve()}"), soft_wrap=True)


def _import_torch_quietly() -> None:
    """Import torch so that its C++ prints no stack where a store is gone: `LaunchError` says so."""
    variable = "TORCH_CPP_LOG_LEVEL"  # read when torch is imported; the ranks do not get it
    if variable in os.environ:
        return
    os.environ[variable] = "ERROR"
    import torch  # noqa: F401

    del os.environ[variable]


def _refuse_with_islands(
    nproc: str, nnodes: int, node_rank: int | None, rdzv_endpoint: str | None
) -> None:
    given = {
        "--nproc": None if nproc == "1" else nproc,
        "--nnodes": None if nnodes == 1 else nnodes,
        "--node-rank": node_rank,
        "--rdzv-endpoint": rdzv_endpoint,
    }
    words = [f"{option} {value}" for option, value in given.items() if value is not None]
    if words:
        raise LaunchError(
            f"--islands with {' '.join(words)}: an island is a job of one rank, and meets the "
            "others at local.rendezvous.store; leave these out, and start jobs on other machines "
            "there"
        )


def options_behind(script: str, args: Sequence[str]) -> list[str]:
    """Options of launch among the arguments of a script whose text does not name them."""
    given = [word.partition("=")[0] for word in args]
    names = {name: name[2:].replace("-", "[-_]") for name in OWN_OPTIONS if name in given}
    text = Path(script).read_text(errors="replace")
    return [name for name, pattern in names.items() if not re.search(pattern, text)]


def _rank_count(nproc: str) -> int:
    if nproc.isdecimal():
        return int(nproc)
    if nproc != "gpu":
        raise LaunchError(f"--nproc {nproc!r}: must be a number, or gpu for one rank a GPU")
    import torch

    if not torch.cuda.is_available():
        raise LaunchError("--nproc gpu: torch sees no GPU here; give a number of ranks")
    return torch.cuda.device_count()


def _environment(spec: LaunchSpec) -> Panel:
    import torch

    table = Table.grid(padding=(0, 2))
    for name, value in {
        "world size": spec.nnodes * spec.nproc,
        "nodes": spec.nnodes,
        "ranks per node": spec.nproc,
        "threads per rank": spec.variables["OMP_NUM_THREADS"],
        "backend": "gloo, nccl on GPUs" if torch.cuda.is_available() else "gloo (no GPU here)",
        "rendezvous": spec.rendezvous,
        "restarts": spec.max_restarts,
        "slipstream": __version__,
        "torch": version("torch"),
        "logs": spec.log_dir,
    }.items():
        table.add_row(Text(name, style="bold"), Text(str(value), overflow="fold"))
    return Panel(table, title="distributed environment", title_align="left", expand=False)


def _say_restart(failure: RankFailure | None) -> None:
    """One line for who failed first, and one for its error."""
    who = "a rank of another node failed" if failure is None else _cause(failure)
    console.print(Text(f"{who}; all ranks start again", style="bold"), soft_wrap=True)
    if failure is not None and failure.error:
        console.print(Text(f"  {failure.error}"), soft_wrap=True)


def _cause(failure: RankFailure) -> str:
    which = f"rank {failure.rank} (local rank {failure.local_rank}) on host {failure.host}"
    return f"{which} {failure.cause}"


def _failure(failure: RankFailure) -> Panel:
    cause = Text(_cause(failure), style="bold")
    log, excerpt = f"log: {failure.log}\n", failure.excerpt()
    return Panel(
        Group(cause, Text(log, overflow="fold"), Text(excerpt, overflow="fold")),
        title=f"rank {failure.rank} " + ("misses another" if failure.missing else "failed first"),
        title_align="left",
        border_style="red",
    )
