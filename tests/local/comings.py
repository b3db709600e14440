"""Jobs that are killed at random moments, and come back, while the others train on.

python -m tests.local.comings 20
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.cli.store import open_store
from tests.harness.scripts import Script

TIMEOUT = 60.0
"""Seconds after which jobs go on without one that is silent; as in job.py."""


ENDLESS = 10**6
"""Updates; `Jobs.end_soon` ends them."""
JOB = Path(__file__).with_name("job.py")


class Jobs:
    """Jobs of one run, and its store."""

    def __init__(self, folder: Path, updates: int, pause: float, settings: Any = None) -> None:
        self.folder, self._store = folder, open_store(0)
        self._arguments = [
            f"127.0.0.1:{self._store.port}",
            str(folder),
            str(updates),
            str(pause),
            json.dumps(settings or {}),
        ]
        self.running: list[Script] = []

    def start(self, script: Path = JOB) -> Script:
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        log.touch()
        job = Script(script, *self._arguments, log=log)
        self.running.append(job)
        return job

    def updates(self, job: Script) -> int:
        path = self.folder / f"{job.pid}.updates"
        return int(path.read_text()) if path.exists() else 0

    def wait_for(self, update: int, job: Script, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while self.updates(job) < update:
            assert job.poll() is None, self.logs()
            assert time.monotonic() < until, self.logs()
            time.sleep(0.02)

    def end_soon(self) -> int:
        """Let all jobs end at the same update, some way on, and return it."""
        last = max(map(self.updates, self.running)) + 100
        part = self.folder / "end.part"
        part.write_text(str(last))
        part.rename(self.folder / "end")
        return last

    def kill(self, job: Script) -> None:
        job.kill()
        self.running.remove(job)

    def end(self, seconds: float = 90) -> list[dict[str, Any]]:
        """What the jobs that ended have found."""
        try:
            for job in self.running:
                assert job.wait(seconds) == 0, self.logs()
        finally:
            for job in self.running:
                job.kill()
        return [json.loads((self.folder / f"{job.pid}.json").read_text()) for job in self.running]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


def survive(kills: int, jobs: int, seed: int) -> tuple[float, float]:
    """Kill a job and let it come back, so many times; loss of a run as long that nobody disturbs,
    and of this one."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Jobs(Path(folder), ENDLESS, 0.05)
        for _ in range(jobs):
            run.start()
        for number in range(kills):
            victim = chance.choice(run.running)
            run.wait_for(run.updates(victim) + chance.randrange(4, 20), victim)
            time.sleep(0.1 * chance.random())
            run.kill(victim)
            newcomer = run.start()
            run.wait_for(1, newcomer)  # it trains again
            print(f"{number + 1} killed and back", file=sys.stderr)
        updates = run.end_soon()
        found = run.end(600)
    with tempfile.TemporaryDirectory() as folder:
        quiet = Jobs(Path(folder), updates, 0.0)
        for _ in range(jobs):
            quiet.start()
        expected = fmean(one["loss"] for one in quiet.end(600))
    assert all(one["longest"] < TIMEOUT for one in found), found
    assert len({one["parameters"] for one in found}) == 1, found
    return expected, fmean(one["loss"] for one in found)


if __name__ == "__main__":
    undisturbed, disturbed = survive(int(sys.argv[1]), 4, seed=0)
    print(f"loss {disturbed:.4f}, undisturbed {undisturbed:.4f}")
