"""Interpreters that cost no imports, for commands that start others by ``sys.executable``.

    def test_launches(forks):  # a fixture of tests/conftest.py
        main(["launch", ...])  # the ranks that it starts are forks, and what these start

A launcher costs 2 s of CPU and a rank that trains 4, most of it for imports. Here a small program
takes the interpreter's place: it hands its arguments, variables, folder, streams and namespaces to
a server that has imported all of it, whose fork goes on (see ``scripts``). The program passes
signals on, and ends as the fork does; where it is killed, so is the fork. A fork differs in
``/proc``, in its end (modules are not taken down), and in what is read at an import: variables such
as ``OMP_NUM_THREADS``, ``COLUMNS`` and ``PYTHON...`` are the server's.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from slipstream.testbed import _enter
from tests.harness.scripts import Script, become, enter_host

IMPORTED = (
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "slipstream.cli.launch",
    "slipstream.cli.doctor.measure",
)
PROGRAM = """#!{python} -IS
import ctypes, json, os, signal, socket, sys

words = sys.argv[1:]
if words[:2] == ["-I", "-S"] and words[2:3] == [{rank!r}]:  # it does no more than this
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.dup2(1, 2)
    words = ["-u", *words[3:]]
elif words[:1] not in (["-u"], ["-m"]) and words[0][:1] == "-":
    os.execv({python!r}, [{python!r}, *words])
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({address!r})
order = json.dumps({{"words": words, "env": dict(os.environ), "folder": os.getcwd()}})
socket.send_fds(line, [order.encode()], [0, 1, 2])
for number in {passed_on!r}:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, _: line.send(bytes([number])))
code = int(line.recv(16) or 70)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def forking() -> Iterator[tuple[str, Callable[[], None]]]:
    """The path of the program, as long as the server is there; and what sees that it is."""
    from slipstream.cluster import _rank

    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        address, program = f"{folder}/line", Path(folder, "python")
        passed_on = [int(number) for number in _enter.FORWARDED]
        facts = {"python": sys.executable, "rank": _rank.__file__, "address": address}
        program.write_text(PROGRAM.format(**facts, passed_on=passed_on))
        program.chmod(0o755)
        log = Path(folder, "log")
        server = Script(Path(__file__), address, str(program), str(os.getpid()), log=log)
        children: set[object] = multiprocessing.process._children  # type: ignore[attr-defined]
        children.discard(server._process)  # tests look at what processes they leave

        def check() -> None:
            assert server.poll() is None, log.read_text()

        try:
            while not (log.exists() and "listens" in log.read_text()):
                check()
                select.select([], [], [], 0.005)
            yield str(program), check
        finally:
            server.kill()


def serve(address: str, program: str, owner: str) -> None:
    """Fork for each program that asks, until this process, or its owner, is killed."""
    tests = os.pidfd_open(int(owner))
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("listens", flush=True)
    asking: dict[socket.socket, int | None] = {}  # the fork of each, while it runs
    running: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process
    while True:
        ready, _, _ = select.select([tests, listener, *asking, *running], [], [])
        if tests in ready:
            return  # forks die with this process
        for one in ready:
            if one is listener:
                line, _ = listener.accept()
                order, streams, _, _ = socket.recv_fds(line, 2**20, 3)
                if order:
                    pid = os.fork()
                    if not pid:
                        for other in (listener, *asking):
                            other.close()
                        os.close(tests)
                        _go_on(order, streams, line, program)
                    asking[line] = pid
                    running[os.pidfd_open(pid)] = pid, line
                else:
                    line.close()
                for stream in streams:
                    os.close(stream)
            elif isinstance(one, int):
                pid, line = running.pop(one)
                os.close(one)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if line in asking:  # the program has not been killed
                    with suppress(OSError):
                        line.send(str(code).encode())
                    asking[line] = None  # the program closes it, as it may still send a signal
            elif one in asking:
                number = b""
                with suppress(ConnectionResetError):  # it was killed before it read the code
                    number = one.recv(1)
                if (fork := asking[one]) is not None:
                    os.kill(fork, number[0] if number else signal.SIGKILL)
                if not number:
                    del asking[one]
                    one.close()


def _go_on(order: bytes, streams: list[int], line: socket.socket, program: str) -> NoReturn:
    """Be the interpreter that a program has asked for, in its namespaces."""
    _enter.libc.prctl(_enter.PR_SET_PDEATHSIG, signal.SIGKILL)
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    line.close()
    os.setsid()
    enter_host(int.from_bytes(credentials[:4], sys.byteorder))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    asked = json.loads(order)
    os.chdir(asked["folder"])
    sys.executable = program
    code = become(asked["words"], asked["env"], sys.path[1:])
    # Not as an interpreter ends, which takes all modules down for longer than a short run takes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(*sys.argv[1:])
