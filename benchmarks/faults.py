"""Every fault again and again: how long until the error, whom it names, and what is left.

    python -m benchmarks.faults --setups 'DDP, watch' --faults 'kill -9' --json faults.json

Three ranks train (``faulty_training``); after 20 updates one of them goes wrong. Under accelerate()
ranks are started without a launcher, so that the last word of each is seen, and forked from a
process that has imported torch, which saves an hour; DDP and FSDP2 run under ``slipstream watch --
torchrun``. Seconds count from the fault until the last of the other ranks has ended, or the watch
has. A run is right where every other rank, or the watch, names the rank that began and no other.
Without a launcher a rank that is stopped stays so; this program kills it, as a launcher would. Full
disks are file systems in memory that only this program sees, for which it must be root. What a
wrong run printed is shown.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock, Thread
from typing import IO

from rich.console import Console
from rich.progress import track
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.faulty_training import BAD, RANKS, TIMEOUT, be_a_rank
from benchmarks.record import finish

SCRIPT = str(Path(__file__).with_name("faulty_training.py"))
ACCELERATE, DDP, FSDP = SETUPS = ("accelerate()", "DDP, watch", "FSDP2, watch")
FAULTS = (
    "kill -9", "SIGSTOP", "endless sleep", "exception", "exit(0)", "loop left early",
    "step skipped", "layer skipped", "batch of a wrong shape", "exchange of a wrong shape",
    "other order of exchanges", "buffer grows", "NaN", "checkpoint folder full",
    "autopsy folder full", "/dev/shm full", "slow rank",
)  # fmt: skip
HARMLESS = {("layer skipped", ACCELERATE), ("slow rank", ACCELERATE), ("buffer grows", FSDP)}
"""Nobody has to end: a layer without a gradient counts as zero, a slow rank is only named, and
FSDP2 does not exchange buffers."""
UNSEEN = {(fault, setup) for fault in ("NaN", "slow rank") for setup in (DDP, FSDP)}
UNSEEN |= {("buffer grows", DDP)}
"""Values and speed cannot be seen from outside; nor that a buffer has another size."""
LIMIT = 400.0
"""Seconds of a run."""
NAMED = re.compile(r"ranks? (\d+)(?: \(host [^)]*\))? (?:is |has |never |ended first|takes )")
NOT_FINITE = re.compile(r"infinite or NaN, before the exchange on rank (\d+)")
CLONE_NEWNS = 0x00020000
IMPORTED = (
    "__main__", "benchmarks.faulty_training", "torch._dynamo", "torch.distributed",
    "slipstream.session.accelerate", "slipstream.calibration.calibrate",
)  # fmt: skip
"""Once, by the process from which ranks are forked."""
EXIT_CODES = Lock()
"""``multiprocessing`` reads them wherever a process starts, and loses one that two threads read."""
RANKS_SERVER = multiprocessing.get_context("forkserver")


class Started:
    """A process, its lines and its end with their times."""

    def __init__(self, process: BaseProcess | subprocess.Popen[str], output: IO[str]) -> None:
        self.process, self._output = process, output
        self.lines: list[tuple[float, str]] = []
        self.ended = 0.0
        self.code: int | None = None
        self._threads = [Thread(target=self._read), Thread(target=self._wait)]
        for thread in self._threads:
            thread.start()

    @classmethod
    def forked(cls, setup: str, fault: str, environ: Mapping[str, str]) -> Started:
        """A rank, forked from a process that has imported torch and slipstream."""
        ours, theirs = RANKS_SERVER.Pipe(duplex=False)
        process = RANKS_SERVER.Process(target=be_a_rank, args=(setup, fault, environ, theirs))
        with EXIT_CODES:
            process.start()
        theirs.close()
        return cls(process, os.fdopen(os.dup(ours.fileno()), errors="replace"))

    @classmethod
    def run(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Started:
        """A command."""
        process = subprocess.Popen(
            argv,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        return cls(process, process.stdout)

    def join(self) -> None:
        """Wait for its end and its last line."""
        for thread in self._threads:
            thread.join()

    @property
    def text(self) -> str:
        """All it has printed."""
        return "\n".join(line for _, line in self.lines)

    def _read(self) -> None:
        with self._output as lines:
            for line in lines:
                self.lines.append((time.time(), line.rstrip()))

    def _wait(self) -> None:
        if isinstance(self.process, BaseProcess):
            wait([self.process.sentinel])
            with EXIT_CODES:
                self.code = self.process.exitcode
        else:
            self.code = self.process.wait()
        self.ended = time.time()


@dataclass(frozen=True)
class Outcome:
    """What one run showed."""

    seconds: float | None
    right: bool
    left: int
    says: str
    printed: str


@dataclass(frozen=True)
class Row:
    """A fault in a setup. ``kind``: ``named``, ``harmless`` or ``unseen``; seconds are None where
    nothing is said."""

    setup: str
    fault: str
    kind: str
    runs: int
    seconds: float | None
    longest: float | None
    right: int
    left: int
    says: str


def run_once(setup: str, fault: str, full: str) -> Outcome:
    """Start the ranks, and look at them until they have ended.

    Args:
        setup: what they train with.
        fault: that of one of them.
        full: a folder on a full disk.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        run = {"FAULTS_RUN": uuid.uuid4().hex, "COLUMNS": "2000"}
        run["FAULTS_FOLDER"] = full if "folder full" in fault else name
        if setup == ACCELERATE:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            started = start_ranks(setup, fault, run, store)
        else:
            started = start_watch(setup, fault, run)
        others = [one for rank, one in enumerate(started) if rank != BAD or len(started) == 1]
        until = time.time() + LIMIT
        while time.time() < until and not all(one.ended for one in others):
            time.sleep(0.02)
        if fault == "SIGSTOP" and setup == ACCELERATE:
            started[BAD].process.kill()
        left = left_of(run["FAULTS_RUN"], {one.process.pid or 0 for one in started})
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in started:
            one.join()
    return judged(setup, fault, started, others, len(left))


def start_ranks(setup: str, fault: str, run: Mapping[str, str], store: TCPStore) -> list[Started]:
    """The ranks themselves, with the variables of a launcher, which keeps their store."""
    place = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is there, and no rank keeps it
    return [
        Started.forked(setup, fault, {**run, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]


def start_watch(setup: str, fault: str, run: Mapping[str, str]) -> list[Started]:
    """The watch, which starts torchrun."""
    folder = str(Path(run["FAULTS_FOLDER"], "autopsy"))
    watch = ["-m", "slipstream", "watch", "--timeout", TIMEOUT, "--folder", folder, "--"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    argv = [sys.executable, *watch, sys.executable, *torchrun, SCRIPT, setup, fault]
    return [Started.run(argv, {**os.environ, **run})]


@contextmanager
def full_file_systems() -> Iterator[str]:
    """Give this process, and those that it starts, a ``/dev/shm`` that holds next to nothing, and
    a folder on a full disk."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise PermissionError(ctypes.get_errno(), "full file systems need root")
    with tempfile.TemporaryDirectory(prefix="full-") as folder:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        for place in ("/dev/shm", folder):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], check=True)
        with suppress(OSError), open(Path(folder, "all"), "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield folder
        subprocess.run(["umount", folder], check=True)


def left_of(run: str, sessions: Collection[int]) -> list[int]:
    """Processes that still live a second after the end of their run."""
    until = time.time() + 1.0
    while found := [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if is_of(pid, run, sessions)
    ]:
        if time.time() > until:
            return found
        time.sleep(0.1)
    return []


def is_of(pid: int, run: str, sessions: Collection[int]) -> bool:
    """Whether a process belongs to a run: by its variables, or by its session, where it was
    forked."""
    with suppress(OSError, ValueError):
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        return state != "Z" and (int(session) in sessions or run.encode() in variables)
    return False


def judged(
    setup: str, fault: str, started: list[Started], others: list[Started], left: int
) -> Outcome:
    """Whom the others named, and after how long."""
    printed = "\n".join(one.text for one in started)
    begun = re.search(r"fault at (\d+\.\d+)", printed)
    if begun is None:
        return Outcome(None, False, left, "", printed)
    goes_on = all(one.code == 0 for one in started)
    seconds: float | None = max(one.ended for one in others) - float(begun[1])
    sentences = [told(one.text) for one in others]
    says = sentences[0]
    if kind_of(setup, fault) == "unseen":
        return Outcome(None, goes_on and not any(sentences), left, "", printed)
    if fault == "slow rank":
        said = [(when, line) for one in others for when, line in one.lines if named(line) == {BAD}]
        seconds = said[0][0] - float(begun[1]) if said else None
        says = told(said[0][1]) if said else ""
        return Outcome(seconds, goes_on and bool(said), left, says, printed)
    if kind_of(setup, fault) == "harmless":
        ends = {line for one in started for _, line in one.lines if line.startswith("trained to")}
        alike = len(ends) == 1 or setup != ACCELERATE
        return Outcome(None, goes_on and alike and not any(sentences), left, says, printed)
    right = all(named(one.text) == {BAD} and one.code for one in others)
    return Outcome(seconds, right, left, says, printed)


def named(text: str) -> set[int]:
    """The ranks that a text blames."""
    return {int(rank) for pattern in (NAMED, NOT_FINITE) for rank in pattern.findall(text)}


def told(text: str) -> str:
    """The last sentence that blames a rank, without what differs between machines."""
    lines = [line for line in text.splitlines() if NAMED.search(line) or NOT_FINITE.search(line)]
    if not lines:
        return ""
    found = NAMED.search(lines[-1])
    line = lines[-1][found.start() if found else lines[-1].index("the gradient") :]
    line = re.sub(r" \(host [^)]*\)| ?\(slipstream autopsy [^)]*\)| ?│", "", line)
    return re.sub(r" \([^)]*cannot be written: .*?\)", "", line).partition(". The param")[0].strip()


def kind_of(setup: str, fault: str) -> str:
    """Whether a fault is to be named."""
    if (fault, setup) in UNSEEN:
        return "unseen"
    return "harmless" if (fault, setup) in HARMLESS else "named"


def row_of(setup: str, fault: str, kind: str, outcomes: Sequence[Outcome]) -> Row:
    """Sum up the runs of a fault."""
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    return Row(
        setup=setup,
        fault=fault,
        kind=kind,
        runs=len(outcomes),
        seconds=statistics.median(seconds) if seconds else None,
        longest=max(seconds, default=None),
        right=sum(one.right for one in outcomes),
        left=sum(one.left for one in outcomes),
        says=next((one.says for one in outcomes if one.right), ""),
    )


def main() -> None:
    """Run every fault in every setup."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=SETUPS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--at-once", type=int, default=4, help="runs that go on at a time")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    console, rows = Console(stderr=True), []
    os.environ["OMP_NUM_THREADS"] = "1"
    RANKS_SERVER.set_forkserver_preload([*IMPORTED])
    with full_file_systems() as full, ThreadPoolExecutor(args.at_once) as pool:
        for setup in args.setups:
            for fault in args.faults:
                runs = pool.map(run_once, *([word] * args.runs for word in (setup, fault, full)))
                shown = track(runs, f"{setup}, {fault}", total=args.runs, console=console)
                outcomes = [*shown]
                for one in outcomes:
                    if not one.right or one.left:
                        console.print(f"wrong, {one.left} left:", style="red")
                        console.print(one.printed, markup=False, highlight=False)
                rows.append(row_of(setup, fault, kind_of(setup, fault), outcomes))
                console.print(rows[-1])
    finish(args.json, "faults", {"at_once": args.at_once, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
