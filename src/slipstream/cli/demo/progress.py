"""The demo's progress bars: what slipstream and DDP try out first, then the trainings in turn."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from slipstream.cli.demo.trainings import DemoTraining


class Bars(Progress):
    """A bar for each step of the demo; only rank 0 shows them."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description:20}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[result]:>27}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )

    def begin(self, what: str, total: int) -> TaskID:
        """A bar of ``total`` steps."""
        return self.add_task(what, total=total, result="")

    def trained(self, bar: TaskID, training: DemoTraining) -> None:
        """Another iteration: its loss and, where iterations are timed, their median."""
        result = f"loss {training.losses[-1].item():.3f}"
        if training.seconds:
            result += f"  median {median(training.seconds):.3f} s"
        self.update(bar, advance=1, result=result)
