"""Run a training script for a few iterations under a strategy, then end all its processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Literal, NamedTuple

from slipstream.errors import TraceError
from slipstream.files.write import write_whole
from slipstream.strategy import Strategy, at_once
from slipstream.trace import Trace, chrome
from slipstream.trace.timeline import timeline

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05
MARK = "SLIPSTREAM_TRIAL"
"""Environment variable of every process of a trial; finds those that outlive their parents."""

TRACE, OUTPUT, STRATEGY = "trace.json", "output.log", "strategy.yaml"
CHECKPOINTS = "checkpoints"
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
"""Colours, and all else that a terminal would obey."""
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*")
_SIDES, _BOTTOM = ("\u2502", "\u256d"), "\u2570"
_FRAME = " \u2502\u256d\u256e\u2570\u256f\u2500"
"""Of a box, as rich draws it; its title may be the class of the error inside."""


class Measurement(NamedTuple):
    """The measurements of one short run, in seconds.

    ``seconds`` is the median over iterations of the mean over ranks; ``spread`` is half the
    distance between its quartiles; ``wall`` is the whole run, from the start of the first process
    to the end of the last.
    """

    seconds: float
    spread: float
    wall: float
    trace: Trace


class Failure(NamedTuple):
    """A run without a measurement: it failed, it hung, or it succeeded without a trace."""

    status: Literal["failed", "hanging", "no trace"]
    reason: str


@dataclass(frozen=True)
class Trials:
    """Runs trials one after the other, each in a folder of its own below ``folder``.

    Args:
        command: from a trial's folder to the command that runs the script under the strategy file
            ``strategy.yaml`` in that folder.
        folder: gets ``01``, ``02`` ..., each with the strategy, the trace and the script's output.
        steps: iterations that are measured.
        skip: warm-up iterations before them.
    """

    command: Callable[[Path], Sequence[str]]
    folder: Path
    steps: int = 10
    skip: int = 3

    def run(
        self, strategy: Strategy, limit: float, *, norms: bool = False
    ) -> Measurement | Failure:
        """Measure one strategy within ``limit`` seconds; no process is left when this returns.

        A codec works from the first update on as it will in the end: a trial is too short to get
        there. ``norms`` are recorded, too, if asked for.
        """
        number = 1 + sum(1 for _ in self.folder.glob("[0-9]*"))
        folder = (self.folder / f"{number:02d}").resolve()
        folder.mkdir(parents=True)
        trace = {"steps": self.steps, "skip": self.skip, "folder": str(folder)}
        trace |= {"norms": True} if norms else {}
        codec = at_once(strategy.gradients.codec)
        traced = strategy.with_gradients(codec=codec).document() | {"trace": trace}
        write_whole(folder / STRATEGY, Strategy.load(traced).to_yaml())
        return measure(self.command(folder), folder, limit)


def measure(command: Sequence[str], folder: Path, limit: float) -> Measurement | Failure:
    """Run ``command`` until it has written ``trace.json`` in ``folder``, at most ``limit`` seconds.

    The command would go on training after that, so it is ended.
    """
    start = time.monotonic()
    with started(command, folder) as process:
        trace = _wait_for_trace(process, folder, start + limit)
    if isinstance(trace, Failure):
        return trace
    seconds = iterations(trace)
    low, _, high = quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
    return Measurement(median(seconds), (high - low) / 2, time.monotonic() - start, trace)


@contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` during the context; its output goes to ``output.log`` in ``folder``.

    At the end it gets SIGTERM, then SIGKILL, as do all processes that it has started, in whatever
    process group or session. Its checkpoints are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, to be killed as one
        )
    try:
        yield process
    finally:
        _end(process, folder)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints; inside a trial one below the trial's folder, so that the
    trial begins at the first update and leaves those of the run alone.

    Example:
        >>> checkpoints_of(Path("runs/a")).as_posix()
        'runs/a'
    """
    trial = os.environ.get(MARK)
    return Path(trial, CHECKPOINTS, *run.absolute().parts[1:]) if trial else run


def last_words(folder: Path) -> str:
    """The last error that a command's output names, else its last line; and the file. An error that
    is the title of a box ends with the box; one inside goes on where the box has broken a line."""
    text = _CONTROL.sub("", (folder / OUTPUT).read_text(errors="replace"))
    said, error, boxed, titled, room = "it wrote nothing", "", False, False, 0
    for line in text.splitlines():
        boxed &= not line.startswith(_BOTTOM)
        if not (words := line.strip(_FRAME).strip()):
            continue
        said, broken = words, room <= len(words.split()[0])  # which had no room in the line before
        if boxed and line.startswith(_SIDES[0]) and (titled or broken):
            error += f" {words}"
        elif match := _ERROR.match(words):
            boxed, titled = line.startswith(_SIDES), line.startswith(_SIDES[1])
            error = match[0] + ":" * titled
        else:
            boxed = False
        room = len(line) - len("\u2502  \u2502") - len(words)
    return (error or said) + _where(folder)


def iterations(trace: Trace) -> list[float]:
    """Seconds of each iteration in order, the mean over ranks.

    On each rank an iteration begins where the last one ended, so the means add up to the time of
    all; the seconds of the slowest rank would count the jitter of its start twice.

    Example:
        >>> from slipstream.trace import Event
        >>> spans = [Event("iteration", rank, 3, 0.0, 1.0 + rank) for rank in range(2)]
        >>> iterations(Trace(tuple(spans)))
        [1.5]
    """
    steps: dict[int, list[float]] = defaultdict(list)
    for one in timeline(trace.events):
        steps[one.step].append(one.duration)
    return [fmean(steps[step]) for step in sorted(steps)]


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the command, its process group, and its processes in other sessions, in this order."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GRACE_SECONDS
    # Again and again: a process may start another one while it is being killed.
    while (pids := _started_by(folder)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 5)


def _wait_for_trace(
    process: subprocess.Popen[bytes], folder: Path, deadline: float
) -> Trace | Failure:
    """The trace as soon as its file is complete, or why there is none."""
    path, began = folder / TRACE, time.monotonic()
    while True:
        code = process.poll()  # before the file is read: it may be written just before the end
        if path.exists():
            try:
                return chrome.read(path)
            except TraceError as error:  # the file is being written, unless the run is over
                if code is not None:
                    return Failure("failed", str(error))
        if code == 0:
            return Failure("no trace", f"it ended without a trace{_where(folder)}")
        if code is not None:
            cause = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            return Failure("failed", f"{cause}: {last_words(folder)}")
        if time.monotonic() > deadline:
            waited = time.monotonic() - began
            return Failure("hanging", f"no trace after {waited:.0f} s: killed{_where(folder)}")
        time.sleep(POLL_SECONDS)


def _where(folder: Path) -> str:
    return f" (see {folder / OUTPUT})"


def _started_by(folder: Path) -> list[int]:
    """The processes of a trial, in any session; none where there is no ``/proc``."""
    mark = f"{MARK}={folder}\0".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or already gone
            if mark in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids
