"""What every rank of ``slipstream doctor network`` runs: measure; rank 0 prints and saves."""

from __future__ import annotations

import json
import sys

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from slipstream.calibration.calibrate import calibrate
from slipstream.cli.doctor.command import Job
from slipstream.cli.doctor.report import report
from slipstream.cluster import connect
from slipstream.errors import SlipstreamError
from slipstream.strategy import Dgc, Half, Int8, OneBit, PowerSgd


def main(argument: str) -> None:
    """Run the job, a JSON document; a user mistake prints its message and exits with code 2."""
    job = Job(**json.loads(argument))
    try:
        measure(job)
    except SlipstreamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def measure(job: Job) -> None:
    """Measure on all ranks; rank 0 prints the report and writes the file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = connect.connect(connect.from_environ(), device)
    console = Console(force_terminal=job.terminal, width=job.columns, quiet=ranks.rank != 0)
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
    try:
        with bar:
            profile = calibrate(
                ranks,
                seconds=job.seconds,
                codecs=(Half(), Int8(), OneBit(), Dgc(), PowerSgd()),
                progress=lambda share, what: bar.update(task, completed=share, description=what),
            )
    finally:
        ranks.close()
    if ranks.rank == 0:
        console.print(report(profile))
        profile.save(job.file)
        console.print(Text(f"written to {job.file}"), soft_wrap=True)


if __name__ == "__main__":
    main(sys.argv[1])
