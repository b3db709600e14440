"""The output of ``slipstream tune``: the current trial and the budget left, then a table."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.tuner.trial_log import Trial, Tuned


def table(tuned: Tuned) -> Table:
    """Each strategy with its first measurement; the pairs of the comparison are in the log."""
    headings = ("measured", "spread", "predicted", "strategy", "why")
    table = compact("trials", *headings, left=["strategy", "why"])
    shown: set[str] = set()
    for trial in tuned.trials:
        if trial.name in shown or trial.status == "not measured":
            continue
        shown.add(trial.name)
        cells = (_ms(trial.measured), _ms(trial.spread), _ms(trial.predicted))
        reason = trial.reason if trial.status == "measured" else f"{trial.status}: {trial.reason}"
        chosen = tuned.strategy.document() == trial.strategy
        table.add_row(*cells, Text(trial.name), Text(reason), style="bold" if chosen else None)
    if left := sum(trial.status == "not measured" for trial in tuned.trials):
        table.caption = f"{left} more were predicted and not measured"
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


class _Left(ProgressColumn):
    """The budget left, as a bar and as a time; redrawn with the spinner."""

    def __init__(self, budget: float, left: Callable[[], float]) -> None:
        super().__init__()
        self._budget, self._left = budget, left

    def render(self, task: Task) -> Table:
        left = self._left()
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._budget, completed=self._budget - left, width=30)
        grid.add_row(bar, f"{left // 60:.0f}:{left % 60:02.0f} of the budget left")
        return grid


class Display(Progress):
    """A line with the current activity and the budget left; above it a line for each trial."""

    def __init__(self, budget: float, console: Console) -> None:
        self._deadline = time.monotonic() + budget
        columns = (SpinnerColumn(), TextColumn("{task.description}"), _Left(budget, self.left))
        super().__init__(*columns, console=console, transient=True)
        self._activity = self.add_task("starting", total=None)

    def left(self) -> float:
        """Seconds left of the budget."""
        return max(0.0, self._deadline - time.monotonic())

    def doing(self, words: str) -> None:
        """Show another activity."""
        self.update(self._activity, description=words)

    def warn(self, words: str) -> None:
        """Print a warning above the line."""
        self.print(Text(f"warning: {words}", style="yellow"), soft_wrap=True)

    def show(self, trial: Trial) -> None:
        """Print the result of a trial above the line."""
        if trial.status != "not measured":
            result = _ms(trial.measured) if trial.status == "measured" else trial.status
            self.print(Text(f"{trial.name}: {result} ({trial.reason})"), soft_wrap=True)
