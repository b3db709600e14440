"""Whether `slipstream launch` names the rank that began a failure, run after run.

    python -m benchmarks.blame --places '3 ranks on one host' --faults 'kill -9' --json blame.json

A small model trains; after 20 updates one rank is killed, raises, or leaves with code 0 or 3. On
one host with three ranks, and on four emulated hosts with one rank each, whose launchers share a
folder of logs. Counted are the runs in which the first panel on stderr names that rank. Runs of
which two go on at a time find the cores busy, which is when peers are late with what they say.
What a wrong run printed is shown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.record import finish

SCRIPT = """
import os, signal, sys, torch, slipstream
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
session = slipstream.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(40):
    if step == 20 and os.environ["RANK"] == "1":
        exec(os.environ["FAULT"])
    session.backward(model(torch.randn(8, 64)).square().mean())
    session.step()
"""
FAULTS = {
    "kill -9": "os.kill(os.getpid(), signal.SIGKILL)",
    "exception": "raise ValueError('a bad sample')",
    "exit(0)": "sys.exit(0)",
    "exit(3)": "sys.exit(3)",
}
PLACES = {
    "3 ranks on one host": ["launch", "--nproc", "3"],
    "4 emulated hosts": ["testbed", "run", "--nodes", "4"],
}
BEGAN = 1
NAMED = re.compile(r"rank (\d+) failed first")


@dataclass(frozen=True)
class Row:
    """One fault in one place."""

    place: str
    fault: str
    runs: int
    right: int


def first_panel(words: list[str], fault: str) -> tuple[int | None, str]:
    """The rank that one run blames, None if none, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", *words, "--log-dir", "logs", "script.py"],
            cwd=folder,
            env={**os.environ, "FAULT": fault, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    printed = done.stderr + done.stdout
    found = NAMED.search(printed)
    return int(found[1]) if found else None, printed


def count(outcomes: Iterable[tuple[int | None, str]], console: Console) -> int:
    """The runs that blame the right rank; the others are shown."""
    right = 0
    for rank, printed in outcomes:
        right += rank == BEGAN
        if rank != BEGAN:
            console.print(f"blames {rank}:", style="red")
            console.print(printed, markup=False, highlight=False)
    return right


def main() -> None:
    """Run every fault in every place."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--places", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--at-once", type=int, default=2, help="runs that go on at a time")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    console, rows = Console(stderr=True), []
    with ThreadPoolExecutor(args.at_once) as pool:
        for place in args.places:
            for fault in args.faults:
                words = [PLACES[place]] * args.runs
                runs = pool.map(first_panel, words, [FAULTS[fault]] * args.runs)
                said = track(runs, f"{place}, {fault}", total=args.runs, console=console)
                rows.append(Row(place, fault, args.runs, count(said, console)))
    entry = {"at_once": args.at_once, "rows": [asdict(row) for row in rows]}
    finish(args.json, "blame", entry)


if __name__ == "__main__":
    main()
