"""Every fault again and again: how long the others wait, whom they name, what is left.

    python -m tests.checks.faults 20

Times count from the fault to the error, with ``checks.timeout`` of 30 s.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from slipstream.checks.autopsy import Autopsy
from tests.checks import test_heartbeat
from tests.checks.test_heartbeat import BAD, FAULTS, with_a_fault
from tests.harness.ranks import RankFailure, Ranks

TIMEOUT = 30.0


def once(ranks: Ranks, fault: str) -> tuple[float, bool]:
    """Seconds from the start of the ranks to the autopsy, and whether that names the right rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.time()
        try:
            ranks.run(with_a_fault, fault, folder, {}, timeout=2 * TIMEOUT)
        except RankFailure as failure:
            autopsy = Autopsy.read(folder)
            right = autopsy.blamed == (BAD,) and len(failure.errors) == ranks.size
            return (folder / "autopsy.json").stat().st_mtime - began, right
    return float("nan"), False


def main(times: int) -> int:
    """Print the table; 1 where a rank was not named."""
    test_heartbeat.TIMEOUT = TIMEOUT
    table = Table("fault", "runs", "seconds to the error", "longest", "right rank named")
    wrong = 0
    with Ranks(3) as ranks:
        ranks.run(test_heartbeat.evaluates, Path(tempfile.mkdtemp()))  # starts the processes
        for fault in FAULTS:
            runs = [once(ranks, fault) for _ in track(range(times), fault, transient=True)]
            seconds, right = [s for s, _ in runs], sum(ok for _, ok in runs)
            wrong += times - right
            median, longest = statistics.median(seconds), max(seconds)
            table.add_row(fault, str(times), f"{median:.1f}", f"{longest:.1f}", str(right))
    Console().print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
