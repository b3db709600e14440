"""The tables of ``slipstream plan``: ranked strategies, and one strategy on other clusters."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from slipstream.analysis.compact_table import compact
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.candidates import TOLERANCE
from slipstream.planner.search.label import label
from slipstream.planner.search.ranking import MARGIN, Bounds, Prediction, ScaleOutPoint
from slipstream.planner.search.unpredicted import Beside
from slipstream.strategy import ByIndexConfig, ShardedConfig, Strategy, late_by
from slipstream.testbed import format_rate

SHOWN = 12
BEST = "\u2192"  # an arrow
_MEANING = (
    "Predicted. Efficiency: the speed of all ranks over the sum of their speeds alone, without any "
    "exchange. MB: memory of gradients, their flags, what a codec keeps and, where the trace tells "
    "it, the optimizer's state on each rank. 80%: with that probability the iteration is no "
    "further off, and the ratio, of the time for a batch to that of the strategy of the trace, "
    f"marked *, lies in between. {BEST} the recommended one: the fastest, of those within "
    f"{TOLERANCE:.1%} of each other the one with the fewest segments, if its whole ratio is below 1"
)
_OF_COMPUTED = f"; a computed split must be {MARGIN:.0%} faster, as predictions of it are too fast"
_OF_SHARDED = (
    f"; sharded must be {MARGIN:.0%} faster, as no rank has whole gradients between backward() "
    "and step()"
)
_OF_LATE = (
    "; a codec that begins late, which comes last, is preferred only where --updates says how many "
    "updates the training takes"
)


def ranking(
    predictions: Sequence[Prediction], best: Prediction, base: Strategy, network: NetworkProfile
) -> Table:
    """The strategies, fastest first; that of the trace and the recommended one are always shown."""
    on_hosts = f" on {network.hosts} hosts" if network.hosts > 1 else ""
    exactness = next((p.exactness for p in predictions if p.strategy == base), base.exactness)
    others = [p.strategy.gradients for p in predictions if p.strategy != base]
    computed = any(isinstance(one.split, ByIndexConfig) for one in others)
    sharded = any(isinstance(one.transport, ShardedConfig) for one in others)
    late = [one for one in predictions if _begins_later(one, best)]
    notes = [_OF_COMPUTED] * computed + [_OF_SHARDED] * sharded + [_OF_LATE] * bool(late)
    table = compact(
        f"{len(predictions)} strategies, {ranks(network.world_size)}{on_hosts}",
        *("iteration", "80%", "ratio", "efficiency", "segments", "MB", "strategy"),
        left=["strategy"],
        caption=f"{_MEANING}{''.join(notes)}. Exactness, unless a line says otherwise: {exactness}",
    )
    in_order = sorted(predictions, key=lambda one: (one in late, one.per_batch))
    for place, prediction in enumerate(in_order):
        is_base, is_best = prediction.strategy == base, prediction is best
        if place >= SHOWN and not is_base and not is_best:
            continue
        name = f"{BEST} " * is_best + label(prediction.strategy) + " *" * is_base
        if prediction.exactness != exactness:
            name += f"\n  {prediction.exactness}"
        table.add_row(
            _seconds(prediction.seconds),
            _reach(prediction.interval),
            "-".join(f"{end:.2f}" for end in prediction.ratio_interval),
            f"{prediction.efficiency:.1%}",
            str(prediction.segments),
            f"{prediction.memory_bytes / 2**20:.1f}",
            Text(name),
            style="bold" if is_base or is_best else None,
        )
    return table


def unsure(first: Prediction, best: Prediction, base: Strategy) -> str:
    """Say why the first of a ranking is not the recommended one; empty: it is."""
    if first is best:
        return ""
    low, high = first.ratio_interval
    name = label(best.strategy)
    instead = "the strategy of the trace stays" if best.strategy == base else f"{name} is surer"
    return (
        f"Not recommended: {label(first.strategy)}. It is predicted to take {first.ratio:.2f} "
        f"times as long as the strategy of the trace, or {low:.2f} to {high:.2f} with a "
        f"probability of 80%: "
        f"{instead}. Only a measurement tells: slipstream tune makes it."
    )


def _begins_later(one: Prediction, best: Prediction) -> bool:
    """Whether a codec begins after the preferred strategy is at work, and is faster then."""
    codecs = (prediction.strategy.gradients.codec for prediction in (one, best))
    begins, best_begins = map(late_by, codecs)
    return begins > best_begins and one.per_batch < best.per_batch


def besides(found: Sequence[Beside], unpredicted: Sequence[str], best: Prediction) -> Text | None:
    """List settings that would make the first strategy faster, and those only a measurement
    judges."""
    lines = [
        f"{_seconds(one.seconds)} ({one.seconds / best.seconds - 1:+.1%}"
        f"{' at best' * one.at_best}) with {one.setting}"
        for one in found
    ]
    if unpredicted:
        lines.append(f"Nothing predicts {', '.join(unpredicted)}: slipstream tune tries them.")
    return Text("\n".join(lines)) if lines else None


def curve(title: str, points: Sequence[ScaleOutPoint], over: str) -> Table:
    """One strategy on clusters with other ``nodes`` or ``rates``, with bars of the efficiency."""
    heading = {"nodes": "nodes", "rates": "rate"}[over]
    table = compact(title, heading, "ranks", "efficiency", "iteration", "samples/s", "")
    for point in points:
        prediction = point.prediction
        table.add_row(
            str(point.nodes) if over == "nodes" else format_rate(point.rate or 0),
            str(point.ranks),
            f"{prediction.efficiency:.1%}",
            _seconds(prediction.seconds),
            _speed(prediction.samples_per_second),
            Bar(1.0, 0.0, min(prediction.efficiency, 1.0), width=20),
        )
    return table


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _reach(interval: Bounds) -> str:
    low, high = interval
    return f"\u00b1{sqrt(high / low) - 1:.0%}"


def _speed(samples_per_second: float) -> str:
    return f"{samples_per_second:.4g}" if samples_per_second else "-"


def ranks(count: int) -> str:
    """A number of ranks in words."""
    return f"{count} rank" if count == 1 else f"{count} ranks"
