"""Stacks of other Python processes, which those write themselves when they get a signal.

An interpreter that starts with ``Dumps.environment`` runs a small ``sitecustomize.py``, which has
``faulthandler`` write all stacks to a file when a signal comes. Its handler is C and needs no GIL,
so a thread that sleeps, or that holds the GIL, is seen, too. In a rank a thread of its own waits at
a pipe until somebody asks for the collectives that torch's flight recorder has; it needs the GIL.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.checks.flight_record import LARGEST, RecordedCollective, collectives_of
from slipstream.checks.stacks import DEPTH, CallSite, Frame, is_script, place_of, shown

SIGNAL = signal.SIGRTMAX - 3
"""One that nobody else uses: it ends a process without a handler."""
MAIN = "MainThread"
WAIT_SECONDS = 3.0
"""For a process to write its stacks."""
RECORD_SECONDS = 1.5
"""For ranks to write what they have of collectives."""
_QUIET, _QUIET_WHEN_WHOLE = 1.0, 0.1
"""Seconds without another byte after which a dump has ended; one whose outermost call is there."""
_POLL_SECONDS = 0.05
_OUTERMOST = (" in <module>\n", " in _bootstrap\n", " in _run_module_as_main\n", "  ...\n")

_HEADER = re.compile(
    r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first"
)
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')

_PLUMBING = re.compile(
    r"/torch/(_ops|_compile|utils/_contextlib|autograd/function|distributed/c10d_logger)\.py$"
    r"|/torch/_dynamo/"
)
"""Calls that pass others on."""
_NO_EXCHANGE = re.compile(r"/torch/distributed/(elastic/|launcher/|run\.py|launch\.py|checkpoint/)")
_DDP = "/torch/nn/parallel/distributed.py"

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_BACKENDS = ("gloo", "nccl", "nccl2")
_TELLS = "tell_collectives"

SITECUSTOMIZE = """\
# Registers a signal at which this process writes its stacks; then the next sitecustomize runs.
import sys


def register(folder):
    import _signal
    import faulthandler
    import os

    def open_own():
        path = os.path.join(folder, "stack.%d" % os.getpid())
        try:
            file = open(path + ".new", "a")
            faulthandler.register({number}, file=file, all_threads=True)
            os.rename(path + ".new", path)  # from now on the signal may be sent
        except Exception:  # the folder is gone, with the watch
            pass

    # To this the signal returns where faulthandler leaves, at the end of the interpreter.
    _signal.signal({number}, _signal.SIG_IGN)
    open_own()
    os.register_at_fork(after_in_child=open_own)
    if {tells} and any(name in os.environ for name in {rank_names!r}):
        import _thread

        _thread.start_new_thread(tell_collectives, (folder,))


def tell_collectives(folder):
    import _signal
    import os

    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())

    def own(name):
        return os.path.join(folder, "%s.%d" % (name, os.getpid()))

    try:
        if os.path.exists(own("asked")):  # of a process that had this number
            os.unlink(own("asked"))
        os.mkfifo(own("asked"))
        while True:
            with open(own("asked")) as pipe:  # waits until somebody opens it
                pipe.read()
            c10d = sys.modules.get("torch._C._distributed_c10d")
            dump = getattr(c10d, "_dump_fr_trace_json", None)  # since torch 2.15
            texts = []
            for name in {backends!r} if dump else ():
                try:
                    texts.append(dump(backend=name).decode())
                except RuntimeError:  # this torch does not have it
                    pass
            with open(own("new"), "w") as file:
                file.write("[" + ",".join(texts) + "]")
            os.rename(own("new"), own("record"))
    except Exception:  # the folder is gone, with the watch
        pass


def run_next(folder):
    own = sys.modules.pop(__name__)
    sys.path[:] = [path for path in sys.path if path != folder]
    try:
        import sitecustomize
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault(__name__, own)


register({folder!r})
run_next({folder!r})
"""


@dataclass(frozen=True, slots=True)
class Dump:
    """The frames of a process, by thread, the innermost first."""

    threads: Mapping[str, Sequence[Frame]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Dump:
        """Read what ``faulthandler`` has written.

        Example:
            >>> dump = Dump.parse('''Current thread 0x00007f (most recent call first):
            ...   File "/home/me/train.py", line 4 in load
            ...   File "/home/me/train.py", line 9 in <module>
            ... ''')
            >>> dump.place.line
            'train.py:4 in load'
        """
        threads: dict[str, list[Frame]] = {}
        name = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current, ident, named = header.groups()
                name = MAIN if current.startswith("Current") else named or f"thread {ident}"
                threads[name] = []
            elif name and (frame := _FRAME.match(line)):
                number = int(frame[2]) if frame[2].isdecimal() else 0
                threads[name].append(Frame(frame[1], number, frame[3]))
        threads = {n: f for n, f in threads.items() if not f or f[-1].name != _TELLS}
        if threads and MAIN not in threads:  # the oldest comes last
            threads[MAIN] = threads.pop([*threads][-1])
        return cls(threads)

    @property
    def place(self) -> CallSite:
        """The place of the main thread."""
        return place_of(self.threads.get(MAIN, ()))

    @property
    def key(self) -> int:
        """Differs where any thread is at another place."""
        return hash(tuple(tuple(frames) for frames in self.threads.values()))

    @property
    def exchange(self) -> str:
        """The exchange in which the main thread waits; empty: in none."""
        return exchange_of(self.threads.get(MAIN, ()))

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Lines of text by thread, the innermost last, as ``stacks.all_stacks`` has them."""
        return {
            name: [
                shown(f, linecache.getline(f.file, f.line).strip()) for f in frames[:DEPTH][::-1]
            ]
            for name, frames in self.threads.items()
        }


def exchange_of(frames: Sequence[Frame]) -> str:
    """Name the exchange that the innermost frames of a stack are in; empty: they are in none.

    Only the innermost call counts: torch's wrappers of models are around the user's code, too.
    """
    inner = [frame for frame in frames[:16] if not _PLUMBING.search(frame.file)]
    if not inner:
        return ""
    first = inner[0]
    if first.name == "_engine_run_backward":  # DDP's hooks are C++, and wait inside
        return "backward"
    if first.file.endswith(_DDP):
        return f"DistributedDataParallel.{first.name.strip('_')}"
    if "/torch/distributed/" in first.file and not _NO_EXCHANGE.search(first.file):
        sharded = any("/torch/distributed/fsdp/" in frame.file for frame in inner[:4])
        return f"FSDP's {first.name}" if sharded else first.name
    if is_script(first.file):  # waits of Python itself are frames of its own files
        source = linecache.getline(first.file, first.line)
        return "an exchange that it waits for" if ".wait(" in source else ""
    return ""


def records_collectives(torch: str) -> bool:
    """Whether a version of torch has a flight recorder for every backend.

    Example:
        >>> records_collectives("2.13.0+cpu"), records_collectives("2.15.0")
        (False, True)
    """
    major, minor = map(int, re.findall(r"\d+", torch)[:2])
    return (major, minor) >= (2, 15)


class Dumps:
    """Asks processes for their stacks.

    Args:
        folder: an empty one, whose path the processes see, too.
        tells: whether their torch has a flight recorder to tell collectives from.
    """

    def __init__(self, folder: Path, *, tells: bool = False) -> None:
        self._folder = folder.resolve()
        text = SITECUSTOMIZE.format(
            number=int(SIGNAL),
            folder=str(self._folder),
            rank_names=_RANK_NAMES,
            backends=_BACKENDS,
            tells=tells,
        )
        (self._folder / "sitecustomize.py").write_text(text)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables with which Python processes can be asked."""
        paths = [str(self._folder), *filter(None, [environ.get("PYTHONPATH")])]
        return {**environ, "PYTHONPATH": os.pathsep.join(paths)}

    def knows(self, pid: int) -> bool:
        """Whether a process can be asked: the signal ends any other."""
        return self._file(pid).exists()

    def of(self, pids: Sequence[int]) -> dict[int, Dump]:
        """The stacks of those processes that write them in time."""
        asked: dict[int, Path] = {}
        for pid in filter(self.knows, pids):
            with suppress(OSError):
                os.truncate(self._file(pid), 0)
                os.kill(pid, SIGNAL)
                asked[pid] = self._file(pid)
        found: dict[int, Dump] = {}
        seen = dict.fromkeys(asked, (-1, 0.0))  # size, and since when
        began = time.monotonic()
        while asked.keys() - found.keys() and time.monotonic() - began < WAIT_SECONDS:
            time.sleep(_POLL_SECONDS)
            for pid in asked.keys() - found.keys():
                text, now = asked[pid].read_text(errors="replace"), time.monotonic()
                if len(text) != seen[pid][0]:
                    seen[pid] = len(text), now
                    continue
                whole = "Current thread" in text and text.endswith(_OUTERMOST)
                if text and now - seen[pid][1] > (_QUIET_WHEN_WHOLE if whole else _QUIET):
                    found[pid] = Dump.parse(text)
        for pid in asked.keys() - found.keys():  # a slow machine: most of it is better than nothing
            if text := asked[pid].read_text(errors="replace"):
                found[pid] = Dump.parse(text)
        return found

    def collectives(self, pids: Sequence[int]) -> dict[int, tuple[RecordedCollective, ...]]:
        """Get the last collectives of those ranks whose torch has a record of them, and whose
        Python answers in time."""
        asked = {pid: self._folder / f"record.{pid}" for pid in pids if self._ask(pid)}
        found: dict[int, tuple[RecordedCollective, ...]] = {}
        until = time.monotonic() + RECORD_SECONDS
        while asked and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            for pid, record in [*asked.items()]:
                if record.exists():
                    del asked[pid]
                    text = record.read_text() if record.stat().st_size <= LARGEST else ""
                    record.unlink()
                    found[pid] = collectives_of(text, time.time())
        return found

    def _ask(self, pid: int) -> bool:
        """Whether a thread of the process has been asked."""
        with suppress(OSError):  # it has none, or answers still
            pipe = os.open(self._folder / f"asked.{pid}", os.O_WRONLY | os.O_NONBLOCK)
            try:  # an answer that came late is whole by now, and the next one waits for the end
                (self._folder / f"record.{pid}").unlink(missing_ok=True)
            finally:
                os.close(pipe)
            return True
        return False

    def _file(self, pid: int) -> Path:
        return self._folder / f"stack.{pid}"
