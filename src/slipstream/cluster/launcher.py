"""Start the ranks of one node with torch's elastic agent, one log a rank; report the first failure.

Prints rank 0's output alone. Imports torch only when ranks start, so that a wrong specification
fails at once.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster import _rank
from slipstream.cluster._agent import Failures, run_ranks
from slipstream.cluster._ends import LOOK_INTERVAL, End
from slipstream.cluster._logs import (
    ERROR,
    PEER_IS_GONE,
    TRACEBACK as TRACEBACK,
    RankLogs,
    excerpt,
    last_lines,
)
from slipstream.cluster.listen import TOKEN, digest, new_token, open_store, run_token
from slipstream.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

LOOK_SECONDS = 2.0
"""How long to wait for notes of ends: of ranks here, and on nodes with the same folder of logs."""
LEAVE_SECONDS = 1.0
"""How long the first of several nodes stays behind its last barrier."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
AGENTS_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""The variable with the signals that torch's agent handles, whether they are ignored or not."""
JOIN_TIMEOUT = 600  # seconds until all nodes must have joined the rendezvous


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A start on this node: ``nproc`` ranks of ``script args``.

    Several nodes (``nnodes``) meet at ``rdzv_endpoint``, HOST:PORT on one of them. With
    ``node_rank`` HOST must be node 0; without it the rendezvous assigns node ranks, and failed
    ranks can be restarted (``max_restarts``). ``variables`` are set for every rank.

    Raises:
        LaunchError: the script does not exist, or a number is out of range or contradicts another.

    Example:
        >>> LaunchSpec(script="train.py", nproc=0, log_dir=Path("logs"))
        Traceback (most recent call last):
        slipstream.errors.LaunchError: --nproc 0: must be at least 1
    """

    script: str
    log_dir: Path
    args: tuple[str, ...] = ()
    module: bool = False
    nproc: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes, restarts = f"--nnodes {self.nnodes}", f"--max-restarts {self.max_restarts}"
        node_rank, several = f"--node-rank {self.node_rank}", self.nnodes > 1
        problems = {
            f"--nproc {self.nproc}: must be at least 1": self.nproc < 1,
            f"{restarts}: must be at least 0": self.max_restarts < 0,
            f"{nodes}: must be at least 1": self.nnodes < 1,
            f"{node_rank} with {nodes}: must be 0..{self.nnodes - 1}": (
                self.node_rank is not None and not 0 <= self.node_rank < self.nnodes
            ),
            f"--rdzv-endpoint {self.rdzv_endpoint!r} is not HOST:PORT, e.g. node0:29500": (
                self.rdzv_endpoint is not None and not _is_endpoint(self.rdzv_endpoint)
            ),
            f"{nodes} needs --rdzv-endpoint HOST:PORT, where the nodes meet and the same on each, "
            "e.g. node0:29500": several and self.rdzv_endpoint is None,
            f"{node_rank} with {restarts}: nodes of fixed rank cannot be restarted; leave out one "
            "of the two": several and self.node_rank is not None and self.max_restarts > 0,
        }
        for problem, present in problems.items():
            if present:
                raise LaunchError(problem)
        if not self.module and not Path(self.script).is_file():
            kind = "is not a file" if Path(self.script).exists() else "does not exist"
            raise LaunchError(
                f"the script {self.script!r} {kind} (in {Path.cwd()}); name a Python file, "
                "or a module with -m"
            )
        if not self.module and Path(self.script).suffix.lower() in (".yaml", ".yml", ".json"):
            raise LaunchError(
                f"the script {self.script!r} is no Python file; a strategy goes before the script: "
                "--strategy FILE"
            )

    @property
    def rendezvous(self) -> str:
        """The rendezvous in words: ``static`` with fixed node ranks, else ``c10d``, and where."""
        return f"{self._backend} at {self.rdzv_endpoint or 'a free local port'}"

    @property
    def _backend(self) -> str:
        return "c10d" if self.nnodes == 1 or self.node_rank is None else "static"


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_host = re.fullmatch(r"[\w.:-]+|\[[\w.:]+\]", host) is not None  # no tcp://
    return is_host and port.isdecimal() and 0 < int(port) < 65536


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first; a ``returncode`` of -n means signal n.

    ``missing``: it only says that another rank has left, which is on a node whose logs are not in
    this folder.
    """

    rank: int
    local_rank: int
    host: str
    returncode: int
    log: Path
    missing: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code as of a shell: 128 + n for signal n; 1 for a rank that left too early, with
        code 0 or one that is not known, as it was stopped meanwhile."""
        return (self.returncode or 1) if self.returncode >= 0 else 128 - self.returncode

    @property
    def cause(self) -> str:
        """The rank's end in words.

        Example:
            >>> RankFailure(0, 0, "a", -9, Path("rank0.log")).cause
            'was killed by SIGKILL (maybe out of memory)'
        """
        if self.returncode == 0:
            return "left while the others were still training"
        if self.returncode > 0:
            lost = ": it misses another rank, whose own log tells why" if self.missing else ""
            return f"exited with code {self.returncode}{lost}"
        number = -self.returncode
        known = number in set(signal.Signals)
        name = signal.Signals(number).name if known else f"signal {number}"
        return f"was killed by {name}{' (maybe out of memory)' if name == 'SIGKILL' else ''}"

    @property
    def error(self) -> str:
        """The line that names the error with which the rank's log ends; empty: there is none."""
        return "" if self.returncode < 0 else _last_error(self.log, self.returncode) or ""

    def excerpt(self) -> str:
        """The last traceback in the rank's log, or its last lines."""
        return excerpt(self.log, self.returncode)


@dataclass(frozen=True)
class Outcome:
    """The end of a launch: 0, the failed rank's exit code, or 128 + the signal that stopped it."""

    exit_code: int
    failure: RankFailure | None = None


def run(
    spec: LaunchSpec, on_restart: Callable[[RankFailure | None], None] = lambda failure: None
) -> Outcome:
    """Start the ranks of this node and wait for them; none is running when this returns.

    Rank ``r`` logs to ``log_dir/rank<r>.log`` (``.restart<n>.log`` after restart n); rank 0's
    output is copied to stdout as it comes. SIGINT, SIGTERM, SIGHUP and SIGQUIT, unless they are
    ignored, are passed to all ranks, which are killed if they run for 30 s more. Call it in the
    main thread.

    Args:
        spec: what to start.
        on_restart: called before the ranks start again, with the one that failed first; None: it
            was on a node whose logs are elsewhere.

    Raises:
        LaunchError: the log folder cannot be written, or the nodes do not meet.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    variables = {**spec.variables}
    if spec.nnodes == 1:  # several nodes have no word in common but what their users set
        variables.setdefault(TOKEN, run_token() or new_token())
    logs = RankLogs(spec.log_dir, variables)
    arguments = ["-m"] * spec.module + [spec.script, *spec.args]
    # The agent substitutes ${local_rank} in arguments (string.Template); $$ stands for a plain $.
    arguments = [argument.replace("$", "$$") for argument in arguments]
    argv = [sys.executable, "-I", "-S", _rank.__file__, *arguments]

    def first(failures: Failures) -> RankFailure | None:
        return _first_failure(failures, logs, several=spec.nnodes > 1)

    def restart(failures: Failures) -> None:
        on_restart(first(failures))

    def ended(failure: RankFailure | None) -> Outcome:
        logs.ends.close(forget=False)
        return Outcome(1 if failure is None else failure.exit_code, failure)

    try:
        with _quiet_and_interruptible(), logs, _meeting_point(spec):
            run_ranks(argv, spec.nproc, _rendezvous(spec), spec.max_restarts, logs, restart)
    except ChildFailedError as error:
        return ended(first(error.failures))
    except SignalException as error:
        return Outcome(128 + error.sigval)
    except RendezvousClosedError as error:
        if logs.restart is None:
            raise LaunchError(
                f"the run that meets at {spec.rdzv_endpoint} has ended: give this one another "
                f"{TOKEN}, or start the store there anew"
            ) from error
        return ended(first({}))
    except (DistError, RendezvousError) as error:
        raise LaunchError(_apart(spec, met=logs.restart is not None, error=error)) from error
    logs.ends.close(forget=True)
    return Outcome(0)


@contextmanager
def _meeting_point(spec: LaunchSpec) -> Iterator[None]:
    """Keep the store of several nodes open until the others have its last answer. It listens on the
    interface of the endpoint, if that is this machine's; else torch's does, on all.

    The agent of the first node closes it once it has passed the last barrier itself, which cuts off
    nodes that still wait there. Stores of one process and port share a server, so this one keeps
    it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if spec.nnodes == 1 or spec.node_rank != 0 or spec.rdzv_endpoint is None:
        yield
        return
    host, _, port = spec.rdzv_endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        store = open_store(host, int(port), multi_tenant=True)
    except OSError:  # another network's name for this machine, maybe
        store = TCPStore(host, int(port), is_master=True, wait_for_workers=False, multi_tenant=True)
    yield
    time.sleep(LEAVE_SECONDS)
    del store


def _rendezvous(spec: LaunchSpec) -> RendezvousParameters:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    alone = spec.nnodes == 1 and spec.rdzv_endpoint is None
    rank = {} if spec.node_rank is None else {"rank": spec.node_rank}
    return RendezvousParameters(
        backend=spec._backend,
        endpoint=spec.rdzv_endpoint or "127.0.0.1:0",
        run_id=f"slipstream-{digest(run_token())}",  # nodes of another token are another run
        min_nodes=spec.nnodes,
        max_nodes=spec.nnodes,
        local_addr="127.0.0.1" if alone else None,
        timeout=JOIN_TIMEOUT,  # of static
        join_timeout=JOIN_TIMEOUT,  # of c10d
        **rank,
    )


def _apart(spec: LaunchSpec, met: bool, error: Exception) -> str:
    """Why nodes do not meet, or not again, in words."""
    if met and type(error).__name__ == "RendezvousConnectionError":
        return (
            f"the store at which the {spec.nnodes} nodes meet ({spec.rdzv_endpoint}) does not "
            "answer: the launcher that keeps it has ended, or its host is down or cut off. No rank "
            "is left on this node. Start the run again with the same command, on each node that "
            "says so; a script with slipstream.Checkpoints goes on from the newest one"
        )
    return (
        f"the {spec.nnodes} nodes did not meet ({spec.rendezvous}): {error}\nCheck that every "
        "node was started with this endpoint (and its own --node-rank, or none with any), and that "
        "the port is free and reachable."
    )


def _first_failure(
    failures: Mapping[int, Any], logs: RankLogs, several: bool
) -> RankFailure | None:
    """The rank that began it; see `blame`. None: one of another node, which notes it elsewhere."""
    host = socket.gethostname()
    known = [
        End(rank, one.local_rank, host, one.exitcode, one.timestamp, str(logs.paths[rank]))
        for rank, one in failures.items()
    ]
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        waiting = bool(failures) and logs.ends.waiting  # else the ranks of this node still run
        noted = End.read(logs.folder)
        codes = {(end.rank, end.returncode) for end in noted}  # of which notes tell the time better
        ends = [*noted, *(end for end in known if (end.rank, end.returncode) not in codes)]
        failure = blame(ends) if ends else None
        sure = not waiting and (not several or (failure is not None and not failure.missing))
        if sure or time.monotonic() > deadline:
            return failure
        time.sleep(LOOK_INTERVAL)  # nothing wakes us up when another process writes its note


def blame(ends: Sequence[End]) -> RankFailure:
    """Find the rank that failed first, among those that have ended; a rank may be there twice.

    A rank whose own error is the last thing in its log, or that a signal ended, comes before those
    that only say that a peer has left; so does one that left without an error. SIGTERM is what the
    agent ends the others with. Within each kind the earliest counts.
    """
    missing = {end.rank for end in ends if _misses_another(end)}
    failed = [end for end in ends if end.returncode not in (0, -signal.SIGTERM)]
    own = [end for end in failed if end.rank not in missing]
    quiet = missing | {end.rank for end in own}
    left = [end for end in ends if end.returncode == 0 and end.rank not in quiet and failed]
    stopped = [end for end in ends if end.returncode]
    first = min(own or left or failed or stopped or ends, key=lambda end: end.time)
    if first in left and _last_error(Path(first.log), 0):  # stopped while it was ending by that
        first = replace(first, returncode=1)
    lost = not own and not left and bool(failed)
    path = Path(first.log)
    return RankFailure(first.rank, first.local_rank, first.host, first.returncode, path, lost)


def _misses_another(end: End) -> bool:
    """Whether all that a rank's log says is that another one has left."""
    if end.returncode < 0 and end.returncode not in (-signal.SIGTERM, -signal.SIGABRT):
        return False
    return PEER_IS_GONE.search(_last_error(Path(end.log), end.returncode) or "") is not None


def _last_error(log: Path, returncode: int) -> str | None:
    """The line that names the error with which a rank's log ends."""
    try:
        text = excerpt(log, max(returncode, 1))
    except OSError:
        return None
    errors = ERROR.findall(text)
    if errors:
        return str(errors[-1])
    return last_lines(text, 3) if returncode == -signal.SIGABRT else None


@contextmanager
def _quiet_and_interruptible() -> Iterator[None]:
    """Inside, the agent logs nothing, and a Ctrl-C ends a wait for other nodes.

    `run` reports what matters. Python's own handler would run only when torch's C++ code returns.
    Once the ranks start, the agent installs handlers of its own, but for what this process ignores,
    as SIGHUP under nohup.
    """
    level, handler = logging.root.manager.disable, signal.getsignal(signal.SIGINT)
    before = os.environ.get(AGENTS_SIGNALS)
    heard = _heard_signals(before)
    os.environ[AGENTS_SIGNALS] = ",".join(heard)
    if signal.SIGINT.name in heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        signal.signal(signal.SIGINT, handler)
        del os.environ[AGENTS_SIGNALS]
        if before is not None:
            os.environ[AGENTS_SIGNALS] = before


def _heard_signals(asked: str | None) -> list[str]:
    """Names of the signals that the agent handles: those ``asked`` for, or its own."""
    names = asked.split(",") if asked else [one.name for one in PASSED_ON]
    return [name for name in names if not _is_ignored(name.strip())]


def _is_ignored(name: str) -> bool:
    number = getattr(signal, name, None)
    return number is not None and signal.getsignal(number) is signal.SIG_IGN
