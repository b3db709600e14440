"""What the demo measured, and the table and the sentence that say what it means.

Never trains and never imports torch: numbers in, words out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from rich.table import Table

from slipstream.errors import TraceError
from slipstream.tuner.significance import median_interval

ALONE, DDP, SLIPSTREAM = "no exchange", "DDP", "slipstream"
METHOD = (
    "Exposed exchange: the median iteration minus the median iteration of the same model without "
    "any exchange, measured between the others ({:.3f} s). Faster and slower: the median of the "
    "iterations' ratios in pairs. After one step: the largest relative difference of a parameter; "
    "sums in another order are rounded otherwise, and training lets that grow. Loss: mean over all "
    "ranks and the last ten steps."
)


@dataclass(frozen=True)
class Planned:
    """The split that was planned, by the last gradient of each segment, and seconds an iteration:
    of the default as predicted and as measured in the trace, and of the plan as predicted."""

    last: list[int]
    default_segments: int
    default_predicted: float
    default_measured: float
    predicted: float


@dataclass(frozen=True)
class Measured:
    """What the ranks measured; mappings are by variant, seconds those of the slowest rank."""

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
        """Write the numbers, and what follows from them, as JSON."""
        path.write_text(json.dumps(asdict(self) | {"results": asdict(compare(self))}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Measured:
        """The inverse of ``write``.

        Raises:
            TraceError: the ranks have left no such file.
        """
        if not path.is_file():
            raise TraceError(f"the demo has left no numbers in {path}; what it printed says why")
        document = json.loads(path.read_text())
        document.pop("results")
        return cls(**document | {"plan": Planned(**document["plan"])})


@dataclass(frozen=True)
class Comparison:
    """The results, by variant where both have one; ``ratio`` is slipstream's time over DDP's.

    Triples are first quartile, median, third quartile; ``ratio_interval`` holds the median with a
    confidence of 95 %, and is None where there are too few iterations for that.
    """

    alone: float
    iteration: dict[str, tuple[float, float, float]]
    exposed: dict[str, float]
    ratio: tuple[float, float, float]
    ratio_interval: tuple[float, float] | None
    loss_difference: float
    accuracy_difference: float


def compare(measured: Measured) -> Comparison:
    """What the numbers say of slipstream against DDP."""
    both = (DDP, SLIPSTREAM)
    seconds, loss, accuracy = measured.seconds, measured.final_loss, measured.accuracy
    alone = median(seconds[ALONE])
    iteration = {name: quartiles(seconds[name]) for name in both}
    pairs = zip(seconds[SLIPSTREAM], seconds[DDP], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return Comparison(
        alone=alone,
        iteration=iteration,
        exposed={name: iteration[name][1] - alone for name in both},
        ratio=quartiles(ratios),
        ratio_interval=median_interval(ratios),
        loss_difference=loss[SLIPSTREAM] - loss[DDP],
        accuracy_difference=accuracy[SLIPSTREAM] - accuracy[DDP],
    )


def table(measured: Measured) -> Table:
    """DDP and slipstream side by side, for a terminal of 80 to 100 columns."""
    found = compare(measured)
    drawn = Table(
        title=f"{measured.model} on {measured.nodes} {measured.network}: "
        f"{len(measured.seconds[DDP])} iterations of each, in turn",
        caption=METHOD.format(found.alone),
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("", "plain DDP", "slipstream", "difference"):
        drawn.add_column(heading, justify="right" if heading else "left")
    (low, middle, high), (our_low, ours, our_high) = found.iteration.values()
    drawn.add_row(
        "iteration, median", _seconds(middle), _seconds(ours), _change(found.ratio[1]), style="bold"
    )
    drawn.add_row("  its quartiles", _range(low, high), _range(our_low, our_high))
    theirs, ours = found.exposed.values()
    drawn.add_row(
        "exposed exchange", _seconds(theirs), _seconds(ours), f"{1e3 * (ours - theirs):+.0f} ms"
    )
    collectives = [measured.all_reduces[name] for name in (DDP, SLIPSTREAM)]
    fused = [f"{measured.gradients} -> {count}" for count in collectives]
    drawn.add_row("gradients -> all-reduces", *fused, f"{collectives[1] - collectives[0]:+d}")
    apart = f"{far:.1e} apart" if (far := measured.apart_after_one_step) else "identical"
    drawn.add_row("parameters after one step", "", "", apart)
    losses = [f"{measured.final_loss[name]:.4f}" for name in (DDP, SLIPSTREAM)]
    drawn.add_row("final loss", *losses, f"{found.loss_difference:+.4f}")
    right = [f"{measured.accuracy[name]:.1%}" for name in (DDP, SLIPSTREAM)]
    points = f"{100 * found.accuracy_difference:+.1f} points"
    drawn.add_row("held-out accuracy", *right, points)
    return drawn


def plan_table(measured: Measured) -> Table:
    """Predicted next to measured, for the default and for what was planned."""
    plan, found = measured.plan, compare(measured)
    ours = found.iteration[SLIPSTREAM][1]
    drawn = Table(title="Predicted next to measured", title_justify="left")
    for heading in ("", "segments", "predicted", "measured", "error"):
        drawn.add_column(heading, justify="right" if heading else "left")
    for name, segments, predicted, seconds in (
        ("default", str(plan.default_segments), plan.default_predicted, plan.default_measured),
        ("planned", str(len(plan.last)), plan.predicted, ours),
    ):
        error = f"{predicted / seconds - 1:+.1%}"
        drawn.add_row(name, segments, _seconds(predicted), _seconds(seconds), error)
    return drawn


def verdict(measured: Measured) -> str:
    """One honest sentence: faster, slower, or too close to say, by the interval of the median.

    Example:
        >>> seconds = {ALONE: [0.5], DDP: [1.0, 1.1, 1.2], SLIPSTREAM: [1.0, 1.0, 1.2]}
        >>> even = {DDP: 1, SLIPSTREAM: 1}
        >>> plan = Planned([8], 1, 1.0, 1.0, 1.0)
        >>> run = Measured(2, "hosts", "net", 9, 99, 8, seconds, even, plan, 0, even, even, {})
        >>> print(verdict(run))
        Too few iterations to say: slipstream took 1.000 of DDP's time.
    """
    found = compare(measured)
    if found.ratio_interval is None:
        return f"Too few iterations to say: slipstream took {found.ratio[1]:.3f} of DDP's time."
    low, high = found.ratio_interval
    if high < 1:
        words = "slipstream was faster in this run: it"
    elif low > 1:
        words = "slipstream was NOT faster in this run: it"
    else:
        words = "Too close to say: slipstream"
    return f"{words} took {found.ratio[1]:.3f} of DDP's time (95 %: {low:.3f} to {high:.3f})."


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile of two values or more."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _range(low: float, high: float) -> str:
    return f"{low:.3f} .. {high:.3f}"


def _change(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%} {'faster' if ratio < 1 else 'slower'}"
