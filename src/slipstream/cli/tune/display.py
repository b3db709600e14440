"""What ``slipstream tune`` shows: the run under way and the budget left, then a table of all runs.

Never runs anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.tuner.trial_log import Trial
from slipstream.tuner.tune import Tuned


def table(tuned: Tuned) -> Table:
    """Every candidate with its first measurement; the pairs of the comparison are in the log."""
    table = Table(title="trials", title_justify="left")
    table.add_column("strategy")
    for heading in ("predicted", "measured", "spread"):
        table.add_column(heading, justify="right")
    table.add_column("what")
    shown: set[str] = set()
    for trial in tuned.trials:
        if trial.name in shown or trial.status == "not measured":
            continue
        shown.add(trial.name)
        cells = (_ms(trial.predicted), _ms(trial.measured), _ms(trial.spread))
        what = trial.reason if trial.status == "measured" else f"{trial.status}: {trial.reason}"
        chosen = tuned.strategy.document() == trial.strategy
        table.add_row(Text(trial.name), *cells, Text(what), style="bold" if chosen else None)
    if left := sum(trial.status == "not measured" for trial in tuned.trials):
        table.caption = f"{left} more were predicted and not measured"
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


class _Left(ProgressColumn):
    """What is left of the budget, as a bar and as a time; it moves by itself."""

    def __init__(self, budget: float, left: Callable[[], float]) -> None:
        super().__init__()
        self._budget, self._left = budget, left

    def render(self, task: Task) -> Table:
        left = self._left()
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._budget, completed=self._budget - left, width=30)
        grid.add_row(bar, f"{left // 60:.0f}:{left % 60:02.0f} of the budget left")
        return grid


class Display:
    """A line with what is being done and the budget that is left; above it a line for each run."""

    def __init__(self, budget: float, console: Console) -> None:
        self._deadline = time.monotonic() + budget
        columns = (SpinnerColumn(), TextColumn("{task.description}"), _Left(budget, self.left))
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def doing(self, words: str) -> None:
        """What is being done from now on."""
        self._progress.update(self._task, description=words)

    def warn(self, words: str) -> None:
        """Something that the numbers rest on is doubtful."""
        self._progress.print(Text(f"warning: {words}", style="yellow"), soft_wrap=True)

    def show(self, trial: Trial) -> None:
        """A run is over."""
        if trial.status == "not measured":
            return
        result = _ms(trial.measured) if trial.status == "measured" else trial.status
        self._progress.print(Text(f"{trial.name}: {result} ({trial.reason})"), soft_wrap=True)
