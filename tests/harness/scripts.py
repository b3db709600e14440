"""Training scripts as processes of their own: forks of the server of the ranks.

    env = torchrun(2)
    both = [Script(path, "--steps", "3", env=env[r], log=tmp_path / f"{r}.log") for r in range(2)]
    assert [script.wait(60) for script in both] == [0, 0]

Equal to as many ``python path --steps 3``, but for the 4 to 8 s of CPU in which each would import
torch: the server has imported it, and has no thread, no group and no session, so that its fork is
an interpreter that has just done so. The file runs as ``__main__``, with arguments, variables,
folder and streams of its own. It ends as an interpreter does: exit handlers run, threads are
joined, modules are taken down, and the code is that of its error or of ``sys.exit``. The objects of
the imports alone are not collected then, as the server has frozen them (see ``frozen``), and
triton's binding says so on stderr. One may run on a host of a testbed: ``host=(bed, node)``.

A test that is about the start needs an interpreter: about its options, about variables that it
reads before the script runs (``PYTHON...``), about what an import brings or warns of.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from slipstream.testbed import Node, Testbed, _enter
from tests.harness.ranks import context, free_port


class Script:
    """``path`` with the arguments ``words``, which runs from now on.

    Args:
        path: of the file.
        words: of its command line.
        env: variables added to those of this process; None: one that it does not get.
        folder: in which it runs; without, this process's own.
        log: the file for what it prints.
        errors: the file for what goes to stderr; without, ``log``.
        strict: a warning is an error, as by ``-W error``.
        host: an emulated one on which it runs, as what ``Testbed.popen`` starts.
    """

    def __init__(
        self,
        path: Path,
        *words: str,
        log: Path,
        errors: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
        strict: bool = False,
        host: tuple[Testbed, Node] | None = None,
    ) -> None:
        files = [str(file.absolute()) for file in (log, errors or log)]
        variables = {n: v for n, v in {**os.environ, **(env or {})}.items() if v is not None}
        holder = None
        if host is not None:
            bed, node = host
            holder = bed._pids[node.index]
            variables["GLOO_SOCKET_IFNAME"] = node.interface
        place = variables, str(folder or "."), files, [*sys.path], sys.executable
        arguments = ([str(path.absolute()), *words], *place, strict, holder)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its code if it has ended; -n if signal n has ended it."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Its code; who takes longer is killed."""
        self._process.join(seconds)
        if self.poll() is None:
            self.kill()
            raise TimeoutError(f"process {self.pid} has not ended within {seconds:g} s")
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def torchrun(size: int) -> list[dict[str, str]]:
    """The variables by which ``torchrun`` tells each of ``size`` ranks on this machine of it."""
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def said_on_hosts(bed: Testbed, text: str, folder: Path, *words: Sequence[str]) -> list[str]:
    """The output of a script that runs on each host of a testbed, and must end well on all.

    ``words``: its arguments by host. torch finds a rank on each host.
    """
    (path := folder / "on_hosts.py").write_text(text)
    common = {"WORLD_SIZE": str(len(bed.nodes)), "MASTER_ADDR": bed.nodes[0].name}
    logs = [folder / node.name for node in bed.nodes]
    errors = [folder / f"{node.name}.errors" for node in bed.nodes]
    scripts = [
        Script(
            path,
            *own,
            log=log,
            errors=error,
            env={**common, "MASTER_PORT": "29500", "RANK": str(node.index)},
            host=(bed, node),
        )
        for node, own, log, error in zip(bed.nodes, words, logs, errors, strict=True)
    ]
    try:
        codes = [script.wait(150) for script in scripts]
    except TimeoutError as late:
        late.add_note(str([error.read_text() for error in errors]))
        raise
    assert codes == [0] * len(codes), [error.read_text() for error in errors]
    return [log.read_text() for log in logs]


def _run(
    words: list[str],
    env: dict[str, str],
    folder: str,
    files: list[str],
    path: list[str],
    executable: str,
    strict: bool,
    holder: int | None,
) -> None:
    """Become the interpreter of a script, and end as it does."""
    # Nothing tells that this is a child: its own ones are started as anybody's.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    this = multiprocessing.current_process()
    this.name = "MainProcess"
    this._config["daemon"] = False  # type: ignore[attr-defined]
    sys.executable = executable
    if holder is not None:
        enter_host(holder)
    for stream, name in zip((1, 2), files, strict=True):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    if strict:
        warnings.simplefilter("error")
    ctypes.pythonapi.Py_Exit(become(words, env, path))


def enter_host(member: int) -> None:
    """Enter the namespaces of a process, if they are others: a child goes on there. This process
    passes signals on to it, ends as it does, and takes it along where it is killed."""
    spaces = [f"/proc/{{}}/ns/{name}" for name in _enter.NAMESPACES]
    if all(os.readlink(one.format(member)) == os.readlink(one.format("self")) for one in spaces):
        return
    here = os.getcwd()
    _enter.enter(str(member))
    os.chdir(here)  # entering a mount namespace moves to its root
    signal.pthread_sigmask(signal.SIG_BLOCK, _enter.FORWARDED)
    pipe = os.pipe()
    child = os.fork()
    if not child:
        _enter.prepare(*pipe)
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _enter.FORWARDED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _enter.FORWARDED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(words: list[str], env: dict[str, str], path: list[str]) -> int:
    """Run ``python WORDS``, which are [-u] FILE ... or [-u] -m MODULE ...; the code of its end."""
    os.environ.clear()
    os.environ.update(env)
    if words[0] == "-u":
        words = words[1:]
        for name, number in (("stdout", 1), ("stderr", 2)):
            was = getattr(sys, name)
            raw: Any = io.FileIO(number, "wb", closefd=False)  # as by -u
            own = io.TextIOWrapper(raw, was.encoding, was.errors, write_through=True)
            setattr(sys, name, own)
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    script = sys.argv[0]
    sys.path[:] = [os.getcwd() if is_module else os.path.dirname(script), *path]
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.modules.pop("__mp_main__", None)
    code = 0
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            exec(compile(Path(script).read_text(), script, "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # from the script on
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    return code
