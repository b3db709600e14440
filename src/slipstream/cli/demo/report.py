"""The demo's measurements as a value, and the tables and the sentence that compare them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from statistics import median, quantiles

from rich.table import Table

from slipstream.analysis.compact_table import compact
from slipstream.errors import TraceError
from slipstream.tuner.significance import median_interval

ALONE, DDP, SLIPSTREAM = "no exchange", "DDP", "slipstream"
METHOD = (
    "Exposed exchange: the median iteration minus the median iteration of the same model without "
    "any exchange, measured between the others ({:.3f} s). Faster and slower: the median of the "
    "ratios of paired iterations. After one step: the largest relative difference of a parameter; "
    "sums in another order round differently, and training amplifies that. Loss: mean over all "
    "ranks and the last ten steps."
)


@dataclass(frozen=True)
class Planned:
    """The planned split and its prediction, next to those of the default; in seconds an iteration.

    ``last`` is the last gradient of each planned segment. ``default_measured`` comes from the
    trace, ``predicted`` is the prediction for the plan.
    """

    last: list[int]
    default_segments: int
    default_predicted: float
    default_measured: float
    predicted: float


@dataclass(frozen=True)
class Measured:
    """What the ranks measured; mappings are by training, seconds those of the slowest rank."""

    nodes: int
    network: str
    model: str
    gradients: int
    parameters: int
    batch: int
    seconds: dict[str, list[float]]
    all_reduces: dict[str, int]
    plan: Planned
    apart_after_one_step: float
    final_loss: dict[str, float]
    accuracy: dict[str, float]
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        """Write the numbers and their comparison as JSON."""
        path.write_text(json.dumps(asdict(self) | {"results": asdict(compare(self))}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Measured:
        """The inverse of ``write``.

        Raises:
            TraceError: the ranks wrote no such file.
        """
        if not path.is_file():
            raise TraceError(f"the demo wrote no numbers to {path}; its output says why")
        document = json.loads(path.read_text())
        document.pop("results")
        return cls(**document | {"plan": Planned(**document["plan"])})


@dataclass(frozen=True)
class Comparison:
    """The results; mappings are by training, ``ratio`` is slipstream's time over DDP's.

    Three numbers are first quartile, median, third quartile; ``ratio_interval`` is the 95 %
    confidence interval of the median, None where there are too few iterations for one.
    """

    alone: float
    iteration: dict[str, list[float]]
    exposed: dict[str, float]
    ratio: list[float]
    ratio_interval: tuple[float, float] | None
    loss_difference: float
    accuracy_difference: float


def compare(measured: Measured) -> Comparison:
    """Compare slipstream with DDP."""
    both = (DDP, SLIPSTREAM)
    seconds, loss, accuracy = measured.seconds, measured.final_loss, measured.accuracy
    alone = median(seconds[ALONE])
    iteration = {name: quantiles(seconds[name], n=4, method="inclusive") for name in both}
    ratios = list(map(truediv, seconds[SLIPSTREAM], seconds[DDP]))
    return Comparison(
        alone=alone,
        iteration=iteration,
        exposed={name: iteration[name][1] - alone for name in both},
        ratio=quantiles(ratios, n=4, method="inclusive"),
        ratio_interval=median_interval(ratios),
        loss_difference=loss[SLIPSTREAM] - loss[DDP],
        accuracy_difference=accuracy[SLIPSTREAM] - accuracy[DDP],
    )


def table(measured: Measured) -> Table:
    """DDP and slipstream side by side."""
    comparison = compare(measured)
    table = compact(
        f"{measured.model} on {measured.nodes} {measured.network}: "
        f"{len(measured.seconds[DDP])} iterations of each, in turn",
        *("", "plain DDP", "slipstream", "difference"),
        left=[""],
        caption=METHOD.format(comparison.alone),
    )
    both = (DDP, SLIPSTREAM)
    spreads = [comparison.iteration[name] for name in both]
    ratio = comparison.ratio[1]
    faster = f"{abs(1 - ratio):.1%} {'faster' if ratio < 1 else 'slower'}"
    medians = [_seconds(middle) for _, middle, _ in spreads]
    table.add_row("iteration, median", *medians, faster, style="bold")
    table.add_row("  its quartiles", *(f"{low:.3f} .. {high:.3f}" for low, _, high in spreads))
    theirs, ours = (comparison.exposed[name] for name in both)
    change = f"{1e3 * (ours - theirs):+.0f} ms"
    table.add_row("exposed exchange", _seconds(theirs), _seconds(ours), change)
    counts = measured.all_reduces
    fused = [f"{measured.gradients} -> {counts[name]}" for name in both]
    table.add_row("gradients -> all-reduces", *fused, f"{counts[SLIPSTREAM] - counts[DDP]:+d}")
    apart = f"{far:.1e} apart" if (far := measured.apart_after_one_step) else "identical"
    table.add_row("parameters after one step", "", "", apart)
    losses = [f"{measured.final_loss[name]:.4f}" for name in both]
    table.add_row("final loss", *losses, f"{comparison.loss_difference:+.4f}")
    right = [f"{measured.accuracy[name]:.1%}" for name in both]
    points = f"{100 * comparison.accuracy_difference:+.1f} points"
    table.add_row("held-out accuracy", *right, points)
    return table


def plan_table(measured: Measured) -> Table:
    """Predicted next to measured times, for the default and for the plan."""
    plan = measured.plan
    headings = ("", "segments", "predicted", "measured", "error")
    table = compact("Predicted next to measured", *headings, left=[""])
    default = (plan.default_segments, plan.default_predicted, plan.default_measured)
    ours = (len(plan.last), plan.predicted, median(measured.seconds[SLIPSTREAM]))
    for name, (segments, predicted, seconds) in {"default": default, "planned": ours}.items():
        error = f"{predicted / seconds - 1:+.1%}"
        table.add_row(name, str(segments), _seconds(predicted), _seconds(seconds), error)
    return table


def verdict(measured: Measured) -> str:
    """Faster, slower, or too close to say, by the confidence interval of the median.

    Example:
        >>> seconds = {ALONE: [0.5], DDP: [1.0, 1.1, 1.2], SLIPSTREAM: [1.0, 1.0, 1.2]}
        >>> even = {DDP: 1, SLIPSTREAM: 1}
        >>> plan = Planned([8], 1, 1.0, 1.0, 1.0)
        >>> run = Measured(2, "hosts", "net", 9, 99, 8, seconds, even, plan, 0, even, even, {})
        >>> print(verdict(run))
        Too few iterations to say: slipstream took 1.000 of DDP's time.
    """
    comparison = compare(measured)
    took = f"took {comparison.ratio[1]:.3f} of DDP's time"
    if comparison.ratio_interval is None:
        return f"Too few iterations to say: slipstream {took}."
    low, high = comparison.ratio_interval
    words = "Too close to say: slipstream"
    if high < 1 or low > 1:
        words = f"slipstream was {'' if high < 1 else 'NOT '}faster in this run: it"
    return f"{words} {took} (95 %: {low:.3f} to {high:.3f})."


def _seconds(value: float) -> str:
    return f"{value:.3f} s"
