"""The table of predicted times to a loss, or losses after a time, of ``tune`` and ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import Any

from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.planner.progress.calibration import LossCalibration
from slipstream.planner.progress.time_to_loss import (
    FAR,
    LossAfter,
    LossForecast,
    Quantiles,
    TimeToLoss,
    verdict,
)
from slipstream.planner.search.label import label
from slipstream.strategy import Strategy

SHOWN = 12
LOSSY_ALONE = (
    "compares strategies that change the mathematics: add --allow-lossy. Exact ones reach every "
    "loss in the same number of updates, so that the fastest is first"
)
_MARKS = {"exact": "", "measured": " \u2020", "noise scale": " \u2021"}
_CAPTION = (
    "Intervals hold 80 %. Better: how sure it is. * the baseline, whose updates exact strategies "
    "take by definition; \u2020 updates from a run on the same batches; \u2021 between the bounds "
    "of the gradient noise scale."
)


def table(found: Sequence[TimeToLoss | LossAfter], base: Strategy, title: str) -> Table:
    """Predictions, the best first; the baseline is always there.

    Args:
        found: of `LossForecast.to_loss` or `LossForecast.after`.
        base: the baseline.
        title: of the table.
    """
    times = isinstance(found[0], TimeToLoss)
    headings = ["time", "updates"] if times else ["loss"]
    headings = [*headings, "an update", "better", "strategy"]
    drawn = compact(title, *headings, left=["strategy"], caption=_CAPTION)
    for place, one in enumerate(found):
        is_base = one.strategy == base
        if place >= SHOWN and not is_base:
            continue
        if isinstance(one, TimeToLoss):
            cells = [interval(one.time, duration), _count(one.updates.middle)]
        else:
            cells = [interval(one.loss, lambda loss: f"{loss:.4g}")]
        better = "-" if is_base else f"{one.better:.0%}"
        name = label(one.strategy) + " *" * is_base + _MARKS[one.source]
        drawn.add_row(
            *(Text(cell) for cell in cells),
            duration(one.seconds),
            better,
            Text(name),
            style="bold" if is_base or place == 0 else None,
        )
    return drawn


def doubts(
    forecast: LossForecast,
    found: Sequence[TimeToLoss | LossAfter],
    base: Strategy,
    seconds: float | None = None,
) -> list[str]:
    """Say what an interval does not hold.

    Args:
        forecast: made the predictions.
        found: them.
        base: the baseline, one of them.
        seconds: that the training lasts; None: until it has a loss.
    """
    of_base = next(one for one in found if one.strategy == base)
    if isinstance(of_base, TimeToLoss):
        updates, verb = of_base.updates.middle, "needs"
    else:
        updates, verb = (seconds or 0.0) / of_base.seconds, "makes"
    if isinf(updates) or forecast.reach(updates) <= FAR:
        return []
    return [
        f"the baseline {verb} some {updates:,.0f} updates, {forecast.reach(updates):,.0f} times "
        "those of the calibration: nobody has held an interval to a measurement so far out"
    ]


def agreement(calibration: LossCalibration) -> list[str]:
    """Say what the gradients of ranks, and what they change, have in common."""
    found = []
    if calibration.noise is not None and calibration.cosine is not None:
        found.append(
            f"gradient noise scale: {calibration.noise:.2g} times the batch of an update; cosine "
            f"between gradients of two ranks: {calibration.cosine:.2f}"
        )
    found += [
        f"{label(Strategy.load(run.strategy))}: cosine between what two ranks change until they "
        f"meet: {run.cosine:.2f}"
        for run in calibration.runs
        if run.cosine is not None
    ]
    return found


def document(found: Sequence[TimeToLoss | LossAfter], base: Strategy) -> dict[str, Any]:
    """Write down the numbers of the table, and the choice; null: never."""
    chosen, words = verdict(found, base)
    rows = []
    for one in found:
        row: dict[str, Any] = {
            "name": label(one.strategy),
            "strategy": one.strategy.document(),
            "source": one.source,
            "seconds": one.seconds,
        }
        for name in ("updates", "time", "ratio", "loss", "gap"):
            if hasattr(one, name):
                row[name] = [None if isinf(v) else v for v in getattr(one, name)]
        row["sure"] = one.better
        rows.append(row)
    return {"predictions": rows, "strategy": chosen.document(), "verdict": words}


def interval(values: Quantiles, text: Any) -> str:
    """The median, and the bounds in brackets.

    Example:
        >>> interval(Quantiles(1.0, 2.0, float("inf")), duration)
        '2.00 s (1.00 s to never)'
    """
    low, middle, high = ("never" if isinf(value) else text(value) for value in values)
    return f"{middle} ({low} to {high})"


def _count(updates: float) -> str:
    return "never" if isinf(updates) else f"{updates:,.0f}"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them.

    Example:
        >>> [duration(value) for value in (0.0123, 42.0, 900.0, 9000.0, 200000.0)]
        ['12.3 ms', '42.0 s', '15.0 min', '2.50 h', '55.6 h']
    """
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size * (1.5 if size > 1 else 1):
            return _three(seconds / size, unit)
    return _three(seconds * 1e3, "ms")


def _three(value: float, unit: str) -> str:
    digits = max(0, 2 - max(len(str(int(value))) - 1, 0))
    return f"{value:,.{digits}f} {unit}"
