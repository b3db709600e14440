"""``slipstream launch --islands``: jobs of one rank that come and go, and their store."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from slipstream.cli.ranks import make_log_folder, slipstream, threads_per_rank
from slipstream.cli.store import open_store
from slipstream.cluster.launcher import LaunchSpec
from slipstream.cluster.listen import TOKEN, new_token, run_token
from slipstream.errors import LaunchError
from slipstream.strategy import Strategy
from slipstream.testbed import stop_processes

LOOK = 0.1
"""Seconds from one look at the jobs to the next."""
STOP = 15.0
"""Seconds that jobs have to end by themselves after Ctrl-C."""
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Islands:
    """Jobs of one script on this machine.

    Args:
        command: of a job, but for its folder of logs.
        count: jobs at the same time.
        restarts: of jobs that fail, in all.
        log_dir: a folder of each job is made in it.
        console: says what becomes of them.
        token: of their store.
    """

    command: Sequence[str]
    count: int
    restarts: int
    log_dir: Path
    console: Console
    token: str
    _jobs: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: int = 0
    _ends: bool = False

    def run(self) -> int:
        """Start them, and return when all have ended: 0, or the code of the last one to fail."""
        code = 0
        try:
            for _ in range(self.count):
                self._start()
            while self._jobs:
                time.sleep(LOOK)
                for number, job in [*self._jobs.items()]:
                    if (ended := job.poll()) is None:
                        continue
                    del self._jobs[number]
                    code = self._ended(number, ended) or code
        except KeyboardInterrupt:
            self.console.print("interrupted: the islands end")
            code = 128 + signal.SIGINT
        finally:
            stop_processes(self._jobs.values(), STOP)
        return code

    def _start(self) -> None:
        folder = self.log_dir / f"island-{self._started}"
        folder.mkdir(parents=True, exist_ok=True)
        shown = None if self._started == 0 else subprocess.DEVNULL
        self._jobs[self._started] = subprocess.Popen(
            [*self.command[:4], "--log-dir", str(folder), *self.command[4:]],
            env={
                **os.environ,
                TOKEN: self.token,
                "OMP_NUM_THREADS": threads_per_rank(self.count),
            },
            stdout=shown,
            stderr=shown,
            preexec_fn=_end_with_parent,
        )
        self._started += 1

    def _ended(self, number: int, code: int) -> int:
        if code == 0:
            self._ends = True  # the run is over, and takes nobody in any more
            return 0
        if self._ends and number >= self.count:
            return 0
        again = self.restarts > 0 and not self._ends
        then = "another one starts" if again else "the others go on"
        self.console.print(f"island {number} ended with code {code}; {then}")
        if again:
            self.restarts -= 1
            self._start()
            return 0
        return code if code > 0 else 128 - code


def _end_with_parent() -> None:
    """No job outlives this process, even if that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_islands(
    words: Sequence[str],
    count: int,
    *,
    module: bool,
    strategy: str | None,
    restarts: int,
    log_dir: Path,
    console: Console,
) -> int:
    """Open a store, start ``count`` jobs of ``words``, and wait for them.

    Raises:
        LaunchError: there is no such script, or the strategy says nowhere where they meet, or its
            port is taken.
    """
    # the same checks as where ranks start
    LaunchSpec(script=words[0], module=module, log_dir=log_dir, max_restarts=restarts)
    local = None if strategy is None else Strategy.load(strategy).local
    if local is None or local.rendezvous is None:
        raise LaunchError(
            f"--islands {count} needs a --strategy that says where they meet, e.g. "
            'local: {steps: 16, rendezvous: {store: "localhost:29400", at_least: 2}}'
        )
    make_log_folder(log_dir, "choose another place by --log-dir")
    host, _, port = local.rendezvous.store.rpartition(":")
    token = run_token() or new_token()
    keeper = open_store(int(port), host.strip("[]"), token)
    said = f"{count} islands meet at {local.rendezvous.store}; logs: {log_dir}"
    console.print(said, markup=False)
    command = slipstream("launch", *["--module"] * module, *words, nproc=1, strategy=strategy)
    try:
        return Islands(command, count, restarts, log_dir, console, token).run()
    finally:
        del keeper
