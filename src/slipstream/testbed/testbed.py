"""``Testbed``: several hosts with shaped links on one Linux machine, for the length of a ``with``.

Leaves nothing behind and the machine's own network as it is: everything lives in namespaces, which
the kernel drops when the keeper (``_keeper.py``) ends, and the keeper ends with the testbed or with
the process that owns it, even if that is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Self

from slipstream.errors import TestbedError
from slipstream.testbed.link_check import LinkCheck, check_links
from slipstream.testbed.machine import find_machine
from slipstream.testbed.network import Distance, Node, make_nodes, plan
from slipstream.testbed.rate import parse_rate

# Isolated and without site-packages: starts in 20 ms.
_PYTHON = (sys.executable, "-I", "-S")
_ENTER = str(Path(__file__).with_name("_enter.py"))
_KEEPER = str(Path(__file__).with_name("_keeper.py"))
GRACE_SECONDS = 5.0


class Testbed:
    """``nodes`` hosts on one switch, each link shaped to ``rate`` both ways.

    Every node has its own network, host name and address; files, users and cores are those of the
    machine. An ordinary user gets the hosts inside a user namespace, where the kernel allows it.

    Raises:
        TestbedError: wrong number of nodes or rate; on entering, if this machine cannot emulate.

    Example:
        >>> with Testbed(nodes=2, rate="1gbit") as bed:  # doctest: +SKIP
        ...     bed.run([["hostname"], ["hostname"]])
        node0
        0
    """

    __test__ = False  # pytest: not a test class, whatever its name

    def __init__(
        self, nodes: int = 4, rate: str = "1gbit", distance: Distance | None = None
    ) -> None:
        self.nodes: tuple[Node, ...] = make_nodes(nodes)
        self.rate: int = parse_rate(rate)  # bits per second
        self.distance: Distance = distance or Distance()
        self._keeper: subprocess.Popen[str] | None = None
        self._pids: list[int] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        machine = find_machine()
        order = {"plan": asdict(plan(self.nodes, self.rate, self.distance)), "tools": machine.tools}
        owner = os.pidfd_open(os.getpid())
        try:
            self._keeper = subprocess.Popen(
                [*machine.unshare, *_PYTHON, _KEEPER, str(owner)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[owner],
                start_new_session=True,  # the terminal's Ctrl-C is for the owner
            )
        finally:
            os.close(owner)
        try:
            self._pids = _ask(self._keeper, order)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper is None:
            return
        self._keeper.communicate()  # closes stdin: the keeper ends, and the kernel kills the rest
        for process in self._started:
            process.wait()
        self._keeper, self._pids, self._started = None, [], []

    def popen(
        self, node: Node, argv: Sequence[str], env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.Popen[Any]:
        """Start ``argv`` on ``node``; returns a ``subprocess.Popen``, which forwards signals, too.

        Args:
            node: one of ``nodes``.
            argv: the program and its arguments.
            env: variables added to this process's own.
            kwargs: other arguments of ``subprocess.Popen``.

        gloo and NCCL get the node's interface, and ``OMP_NUM_THREADS`` is 1 unless it is set,
        because the hosts share the machine's cores. Leaving the testbed kills what still runs.

        Raises:
            TestbedError: the testbed has not been entered.
        """
        if self._keeper is None:
            raise TestbedError("the testbed is not up: use it inside `with Testbed(...) as bed:`")
        process = subprocess.Popen(
            [*_PYTHON, _ENTER, str(self._pids[node.index]), *argv],
            env={"OMP_NUM_THREADS": "1"}
            | dict(os.environ)
            | {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": node.interface}
            | dict(env or {}),
            **{"start_new_session": True, **kwargs},
        )
        self._started.append(process)
        return process

    def check(self) -> list[LinkCheck]:
        """Measure rate and round trip between node 0 and each other node, in about a second.

        Raises:
            TestbedError: the measurement failed.
        """
        return check_links(self.nodes, self.popen)

    def run(self, argvs: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> int:
        """Run one command on each node; returns 0, or the code of the node that failed first.

        Node 0 writes to this process's stdout and stderr; the output of another node is shown, on
        stderr, only if that node fails. When a node fails, the others are stopped. Signal ``n``
        counts as code ``128 + n``.

        Raises:
            TestbedError: the number of commands is not the number of nodes.
        """
        if len(argvs) != len(self.nodes):
            raise TestbedError(
                f"{len(argvs)} commands for {len(self.nodes)} nodes; give one for each node"
            )
        with ExitStack() as cleanup:
            processes: list[subprocess.Popen[Any]] = []
            cleanup.callback(stop_processes, processes, GRACE_SECONDS)
            logs = [cleanup.enter_context(tempfile.TemporaryFile()) for _ in self.nodes]
            for node, argv, log in zip(self.nodes, argvs, logs, strict=True):
                quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                processes.append(self.popen(node, argv, env, **(quiet if node.index else {})))
            for index in _as_ended(processes):
                if status := processes[index].wait():
                    code = status if status > 0 else 128 - status
                    if index:
                        _show(self.nodes[index], code, logs[index])
                    return code
            return 0


def _ask(keeper: subprocess.Popen[str], order: dict[str, Any]) -> list[int]:
    """Let the keeper build the hosts; returns the process that holds each."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with suppress(BrokenPipeError):  # the keeper has ended; its error is in stdout
        keeper.stdin.write(json.dumps(order) + "\n")
        keeper.stdin.flush()
    line = keeper.stdout.readline().strip()
    try:
        answer = json.loads(line)
    except ValueError:
        answer = {"error": line or "the keeper ended without a message"}
    if "error" in answer:
        raise TestbedError(f"the hosts could not be built: {answer['error']}")
    return list(answer["pids"])


def _as_ended(processes: list[subprocess.Popen[Any]]) -> Iterator[int]:
    """Indices of ``processes`` in the order in which they end."""
    with ExitStack() as cleanup:
        running: dict[Any, int] = {os.pidfd_open(p.pid): i for i, p in enumerate(processes)}
        for pidfd in running:
            cleanup.callback(os.close, pidfd)
        while running:
            yield from [running.pop(pidfd) for pidfd in wait(running)]


def _show(node: Node, code: int, log: IO[bytes]) -> None:
    log.seek(0)
    text = log.read().decode(errors="replace")
    output = f"; its output:\n{text.rstrip()}" if text else ""
    print(f"{node.name} ended with code {code}{output}", file=sys.stderr, flush=True)


def stop_processes(processes: Collection[subprocess.Popen[Any]], seconds: float) -> None:
    """End those that still run: SIGTERM, then SIGKILL after so many seconds, for all together."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
