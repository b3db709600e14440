"""The processes below one: which of them are ranks, and how all of them end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slipstream.checks.vitals import PROC, children, descendants
from slipstream.cluster.environment import Environment
from slipstream.errors import ClusterError

_LAUNCHERS = ("torchrun", "mpi", "slurm")
"""In order of precedence: Slurm may start torchrun, which starts the ranks."""
_SET_CHILD_SUBREAPER = 36
_DEVICES = "/dev/nvidia"
_POLL_SECONDS = 0.05


class RankProcess(NamedTuple):
    """A process that is a rank, and its place among the ranks."""

    pid: int
    environment: Environment


def ranks_below(
    root: int, is_python: Callable[[int], bool], proc: Path = PROC
) -> dict[int, RankProcess]:
    """Find the ranks among the descendants of a process.

    The topmost processes whose variables describe a rank: what these start (workers that load data)
    inherits them. Of a shell that starts a rank's Python, that Python.
    """
    found: dict[str, dict[int, RankProcess]] = {launcher: {} for launcher in _LAUNCHERS}
    open_: list[tuple[int, frozenset[str]]] = [(pid, frozenset()) for pid in children(root, proc)]
    while open_:
        pid, above = open_.pop()
        environment = _environment(pid, proc)
        source = environment.source
        if source != "none" and source not in above:
            below = (pid, *descendants(pid, proc))
            own = next(filter(is_python, below), pid)
            found[source].setdefault(environment.rank, RankProcess(own, environment))
            above |= {source}
        open_ += [(child, above) for child in children(pid, proc)]
    return next(filter(None, found.values()), {})


def _environment(pid: int, proc: Path) -> Environment:
    with suppress(OSError, ClusterError):  # gone, another user's, or half a description
        lines = (proc / f"{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return Environment.read(dict(line.partition("=")[::2] for line in lines))
    return Environment()


def uses_device(pid: int, proc: Path = PROC) -> bool:
    """Whether a process computes on a device, for which its threads may spin."""
    with suppress(OSError):
        for descriptor in (proc / f"{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).startswith(_DEVICES):
                    return True
    return False


def adopt_orphans() -> None:
    """Let processes whose parents end become children of this one, so that none gets lost."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def reap(but: int) -> None:
    """Take note of the ends of this process's children other than ``but``."""
    for pid in children(os.getpid()):
        if pid != but:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_all(root: int, patience: float, but: int) -> None:
    """End all processes below ``root``, those that are stopped, too; kill what is left then.

    Args:
        root: this process, as far as orphans are to be found.
        patience: seconds until those that live are killed.
        but: child of this process whose exit code somebody else takes.
    """
    ended = time.monotonic() + patience
    _send(descendants(root), (signal.SIGTERM, signal.SIGCONT))
    while living := _living(root, but):
        now = time.monotonic()
        if now > ended:
            _send(living, (signal.SIGKILL,))
        if now > ended + patience:  # it waits for a disk, and ends with it
            return
        time.sleep(_POLL_SECONDS)


def _living(root: int, but: int) -> list[int]:
    reap(but)
    found = []
    for pid in descendants(root):
        with suppress(OSError, IndexError):
            letter = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if letter != "Z":
                found.append(pid)
    return found


def _send(pids: Iterable[int], signals: Iterable[signal.Signals]) -> None:
    for number in signals:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
