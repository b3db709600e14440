"""Ranks that commands start: the command line of ``slipstream launch``, threads, hosts and logs.

Never trains and never measures: whatever runs on the ranks is passed in.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.cluster.environment import Environment
from slipstream.cluster.launcher import TRACEBACK, LaunchSpec, run
from slipstream.errors import LaunchError
from slipstream.testbed import Node, Testbed, format_rate

PORT = 29500
"""Where the ranks of emulated hosts meet; the hosts' networks are their own, so it is free."""


def log_folder(prefix: str = "") -> Path:
    """A folder for the logs of this run: ``slipstream-logs/[PREFIX-]TIME-PID``."""
    return Path("slipstream-logs", f"{prefix}{time.strftime('%F_%H-%M-%S')}-{os.getpid()}")


def make_log_folder(folder: Path, fix: str) -> None:
    """Make the folder of a command's runs; ``fix`` says how to choose another.

    Raises:
        LaunchError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be made: {error.strerror}; {fix}") from None
    if not os.access(folder, os.W_OK):
        raise LaunchError(f"{folder} cannot be written; {fix}")


def threads_per_rank(ranks: int) -> str:
    """``OMP_NUM_THREADS`` if it is set, else the cores of this host shared out among its ranks."""
    cores = len(os.sched_getaffinity(0))
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // max(ranks, 1)))


def launched() -> Environment | None:
    """The launcher's settings where this process is one of several ranks; a shell of a cluster has
    one task, and is none."""
    here = Environment.read(os.environ, socket.gethostname())
    return here if here.source != "none" and here.world_size > 1 else None


def refuse_launcher(command: str) -> None:
    """Refuse to run as one of several ranks; ``command`` is the right way to run it.

    Raises:
        LaunchError: a launcher has started this process.
    """
    if here := launched():
        raise LaunchError(
            f"a launcher ({here.source}) has started this as rank {here.rank}, but this command "
            f"starts the ranks itself. Run it once, without a launcher: {command}"
        )


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this command as Ctrl-C does, with all processes of a run; not one
    that is ignored, as under nohup."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def slipstream(command: str, *words: str, **options: object) -> list[str]:
    """The command line of one of slipstream's commands; an option of None is left out.

    Example:
        >>> slipstream("launch", "train.py", nproc=2, log_dir="logs", strategy=None)[3:]
        ['launch', '--nproc', '2', '--log-dir', 'logs', 'train.py']
    """
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    flags = [str(w) for name, value in given.items() if value is not None for w in (name, value)]
    return [sys.executable, "-m", "slipstream", *command.split(), *flags, *words]


def run_on_this_host(module: str, argument: str, ranks: int, console: Console) -> int:
    """Run ``python -m MODULE ARGUMENT`` as so many ranks; say which failed, return its code."""
    with tempfile.TemporaryDirectory(prefix="slipstream-logs-") as folder:
        variables = {"OMP_NUM_THREADS": threads_per_rank(ranks)}
        words: dict[str, Any] = {"script": module, "module": True, "args": (argument,)}
        outcome = run(LaunchSpec(**words, nproc=ranks, log_dir=Path(folder), variables=variables))
        if failure := outcome.failure:
            text = failure.excerpt()
            # What rank 0 wrote has been shown as it came, but for a traceback.
            shown = failure.rank == 0 and not TRACEBACK.search(text)
            console.print(Text(f"rank {failure.rank} {failure.cause}" + f":\n{text}" * (not shown)))
        elif outcome.exit_code:
            console.print(f"stopped by signal {outcome.exit_code - 128}: no rank is left running")
    return outcome.exit_code


def run_on_hosts(
    bed: Testbed, words: Sequence[str], ranks_per_node: int, logs: Path, strategy: str | None = None
) -> int:
    """Launch ``words`` on all hosts of a testbed; returns 0, or the code of the first to fail."""
    endpoint = f"{bed.nodes[0].address}:{PORT}"
    shape = {"nnodes": len(bed.nodes), "nproc": ranks_per_node, "rdzv_endpoint": endpoint}
    files = {"log_dir": logs, "strategy": strategy}
    launches = [
        slipstream("launch", *words, node_rank=node.index, **shape, **files) for node in bed.nodes
    ]
    return bed.run(launches)


def on_node(bed: Testbed, node: Node, argv: Sequence[str]) -> list[str]:
    """The command line that makes ``argv`` the one rank of a node, without a launcher."""
    variables = {
        "RANK": node.index,
        "WORLD_SIZE": len(bed.nodes),
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": bed.nodes[0].address,
        "MASTER_PORT": PORT,
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *argv]


def describe_hosts(bed: Testbed) -> str:
    """Measure the first link of a testbed that is up, and say what the hosts are."""
    links = bed.check()
    if not links:
        return "1 emulated host, without a link"
    link = links[0]
    return (
        f"{len(bed.nodes)} emulated hosts, links of {format_rate(bed.rate)}; {link.node.name} "
        f"reads {format_rate(link.there)}, round trip {link.round_trip * 1e6:.0f} us"
    )
