"""``slipstream watch``: end a run that hangs and say whom it waits for, whatever its script is."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer import Argument, Option

from slipstream.checks.autopsy import Autopsy
from slipstream.checks.board import Board, NoteStore
from slipstream.checks.dumps import Dumps, records_collectives
from slipstream.checks.limits import EXIT_CODE, interval_of
from slipstream.checks.processes import adopt_orphans, end_all, reap
from slipstream.checks.rank_ends import RankEnds
from slipstream.checks.vitals import PROC
from slipstream.checks.watch import Watch
from slipstream.checks.watched_host import WatchedHost
from slipstream.cli.options import check_folder
from slipstream.cluster import listen
from slipstream.errors import ClusterError, LaunchError
from slipstream.files.write import write_whole
from slipstream.strategy.duration import seconds_of
from slipstream.version import __version__

PATIENCE = 5.0
"""Seconds from SIGTERM to SIGKILL."""
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_VERSION = "version"
"""The key of the version of host 0's watch."""

# stdout is that of the command.
console = Console(stderr=True)


def watch(
    command: Annotated[
        list[str], Argument(help="Command that starts the ranks of this host: torchrun, mpirun.")
    ],
    timeout: Annotated[
        str, Option(metavar="TIME", help="Within which a run that hangs ends: 30s, 5m.")
    ] = "60s",
    folder: Annotated[Path, Option(help="Gets the autopsy of a run that hung.")] = Path(
        "slipstream-autopsy"
    ),
    meet: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="Where the watches of several hosts meet, on host 0."),
    ] = None,
    hosts: Annotated[int, Option(min=1, help="Number of hosts, each with a watch.")] = 1,
    host_rank: Annotated[int, Option(min=0, help="Index of this host, from 0.")] = 0,
) -> None:
    """Run a command, and end it with an autopsy if its ranks hang.

    For scripts that do not know slipstream: nothing is wrapped or patched. Returns the command's
    exit code, or 75 if it hung.

    [dim]slipstream watch --timeout 30s -- torchrun --nproc-per-node 2 train.py[/dim]
    [dim]slipstream watch --meet node0:29700 --hosts 2 --host-rank 0 -- torchrun ...[/dim]
    """
    seconds = seconds_of(timeout)
    if not seconds:
        raise LaunchError(f"--timeout {timeout!r}: must be a time with its unit: 30s, 5m, 1h")
    check_folder("--folder", folder)
    if not (PROC / "self/stat").exists():
        raise LaunchError("watch reads /proc, which this system does not have; it needs Linux")
    board = _board(meet, hosts, host_rank)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="slipstream-watch-") as scratch:
        installed = version("torch")
        tells = records_collectives(installed)
        dumps = Dumps(Path(scratch), tells=tells)
        seen = "stacks and torch's flight recorder" if tells else "stacks alone"
        _say(
            f"a run that hangs ends after {timeout}; seen are the ranks' processes (computing, "
            f"bytes, state) and the stacks of their Python. torch {installed}: collectives are "
            f"seen from {seen}"
        )
        host = WatchedHost(os.getpid(), socket.gethostname(), dumps, interval_of(seconds))
        watching = Watch(host, seconds, board, hosts=hosts, host_rank=host_rank)
        ends = RankEnds(host.host)
        with _running(command, dumps.environment(os.environ)) as (child, passed_on):
            found = _watched(child, watching, host, ends)
            if child.returncode != 0 and not passed_on and (first := ends.words):
                _say(first)
            if found is None:
                code = child.returncode
                raise typer.Exit(code if code >= 0 else 128 - code)
            text = _write(found, folder)
            end_all(os.getpid(), PATIENCE, child.pid)
            child.wait()
            watching.close()
    box = Panel(Text(text), title="HangError", title_align="left", border_style="red")
    console.print(box)  # last: launchers have much to say of the signal that ends them
    raise typer.Exit(EXIT_CODE)


def _watched(
    child: subprocess.Popen[bytes], watching: Watch, host: WatchedHost, ends: RankEnds
) -> Autopsy | None:
    """Watch the command to its end; an autopsy: it hangs. An error of the watch does not end it."""
    try:
        found = _until_it_ends(child, watching, host, ends)
        if found is None:
            watching.leave(time.monotonic())
        return found
    except Exception as error:
        _say(f"has failed, and watches no more: {type(error).__name__}: {error}")
        child.wait()
        return None


def _until_it_ends(
    child: subprocess.Popen[bytes], watching: Watch, host: WatchedHost, ends: RankEnds
) -> Autopsy | None:
    """Watch; an autopsy: it hangs."""
    ended = select.poll()
    descriptor = os.pidfd_open(child.pid)
    ended.register(descriptor, select.POLLIN)
    try:
        while not ended.poll(1e3 * watching.interval):
            reap(but=child.pid)
            found = watching.beat(time.monotonic())
            ends.follow(host.living)
            for hint in watching.hints():
                _say(hint)
            if found is not None:
                return found
    finally:
        os.close(descriptor)
    child.wait()
    return None


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"{command[0]!r} cannot be started: {error.strerror}") from None


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start the command, and pass signals on to it; gives it, and those that came."""
    child: subprocess.Popen[bytes] | None = None
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    heard = [n for n in _PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN]  # not of nohup
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        child = _start(command, environment)
        for early in [*came]:
            os.killpg(child.pid, early)
        yield child, came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _board(meet: str | None, hosts: int, host_rank: int) -> Board | None:
    if meet is None and (hosts, host_rank) != (1, 0):
        raise LaunchError(
            f"--hosts {hosts} --host-rank {host_rank} need --meet HOST:PORT, where the watches "
            "meet, the same on each host, e.g. node0:29700"
        )
    if host_rank >= hosts:
        raise LaunchError(f"--host-rank {host_rank} with --hosts {hosts}: must be 0..{hosts - 1}")
    if meet is None or hosts == 1:
        return None
    address, _, port = meet.rpartition(":")
    address = address.strip("[]")  # of IPv6
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--meet {meet!r} is not HOST:PORT, e.g. node0:29700")
    prefix = f"slipstream/watch/{listen.digest(listen.run_token())}"
    if host_rank != 0:
        return Board(lambda: _connect(address, int(port), prefix), prefix)
    try:
        store = listen.open_store(address, int(port))
    except (RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise LaunchError(f"--meet {meet} cannot be used: {reason}; give another one") from error
    listen.admit(store, listen.run_token(), meet)
    store.set(f"{prefix}/{_VERSION}", __version__)
    return Board(lambda: store, prefix)


def _connect(address: str, port: int, prefix: str) -> NoteStore:
    """Connect to the store of host 0.

    Raises:
        ClusterError: it is another run's, or the watch there is of another version.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # late: slow to import

    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
    listen.admit(store, listen.run_token(), f"{address}:{port}")
    try:
        theirs = store.get(f"{prefix}/{_VERSION}").decode()
    except RuntimeError:  # it is there once the token is, but for versions that did not tell theirs
        theirs = "another version"
    if theirs != __version__:
        raise ClusterError(
            f"the watch of host 0 is of slipstream {theirs}, this one of {__version__}; install "
            "the same on all hosts"
        )
    return store


def _write(found: Autopsy, folder: Path) -> str:
    """Write the autopsy; returns the error that tells of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "autopsy.json", found.model_dump_json(indent=1))
    except OSError as error:
        return f"{found.verdict} ({folder} cannot be written: {error.strerror})"
    return f"{found.verdict} (slipstream autopsy {folder})"


def _say(text: str) -> None:
    console.print(Text(f"slipstream watch: {text}"), soft_wrap=True, style="dim")
