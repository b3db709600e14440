"""Trainings that are killed again and again: do they end with the bits of an undisturbed one?

    python -m benchmarks.kills --kills 100 --json kills.json

Two ranks write a checkpoint after each update. One of them gets SIGKILL at a random moment, both
start anew and go on from the newest checkpoint that is whole. Every loss of every life, and the
parameters at the end, must be those of a run that nobody disturbed; the first other bit ends this.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console
from rich.progress import Progress

from benchmarks.record import finish
from tests.checkpoint.kills import survive
from tests.harness.ranks import Ranks

SETTINGS = ("codec, sharded, accumulation, loss scale", "local", "balanced data")
"""Of the trainings that tests resume."""


@dataclass(frozen=True)
class Row:
    """One training."""

    setting: str
    kills: int
    torn: int
    seconds: float


def main() -> None:
    """Kill each training so many times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="of each training")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    rows = []
    with Ranks(2) as ranks, Progress(console=Console(stderr=True)) as progress:
        for setting in args.settings:
            bar = progress.add_task(setting, total=args.kills)
            begun = time.monotonic()
            kills, torn = survive(ranks, setting, args.kills, 0, partial(progress.advance, bar))
            rows.append(Row(setting, kills, torn, round(time.monotonic() - begun, 1)))
    finish(args.json, "kills", {"ranks": 2, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
