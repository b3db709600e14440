"""The program of every rank of ``slipstream doctor network``; rank 0 prints and saves."""

from __future__ import annotations

import json
import sys
from contextlib import closing

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from slipstream.calibration.calibrate import calibrate
from slipstream.cli.doctor.report import report
from slipstream.cluster import connect
from slipstream.errors import SlipstreamError
from slipstream.strategy import DgcConfig, HalfConfig, Int8Config, OneBitConfig, PowerSgdConfig


def measure(file: str, seconds: float, terminal: bool, columns: int) -> None:
    """Measure on all ranks; rank 0 prints the report and writes the file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = connect.connect(connect.from_environ(), device)
    console = Console(force_terminal=terminal, width=columns, quiet=ranks.rank != 0)
    bar = Progress(
        TextColumn("{task.description:26}"),
        BarColumn(bar_width=None),
        TimeElapsedColumn(),
        console=console,
        expand=True,
        transient=True,
        disable=ranks.rank != 0 or not console.is_terminal,
    )
    task = bar.add_task("", total=1.0)
    said = ""

    def progress(share: float, what: str) -> None:
        nonlocal said
        if ranks.rank == 0 and not console.is_terminal and what != said:
            print(f"{share:4.0%} {what}", flush=True)
        said = what
        bar.update(task, completed=share, description=what)

    with closing(ranks), bar:
        profile = calibrate(
            ranks,
            seconds=seconds,
            codecs=(HalfConfig(), Int8Config(), OneBitConfig(), DgcConfig(), PowerSgdConfig()),
            half=True,
            merging=True,
            progress=progress,
        )
    if ranks.rank == 0:
        console.print(report(profile))
        profile.save(file)
        console.print(Text(f"written to {file}"), soft_wrap=True)


if __name__ == "__main__":
    try:
        measure(**json.loads(sys.argv[1]))
    except SlipstreamError as error:  # a user's mistake
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
