"""The advisor's rules about how gradients are split into segments.

Each docstring says when the rule fires and how it computes the gain. What an untraced split would
take comes from ``SplitModel``: ready times as traced, one exchange at a time, in order. It does not
model that exchanges slow down compute.
Source: Huawei, CANN TensorFlow tuning guide, gradient segmentation (the three scenarios).
"""

from __future__ import annotations

from typing import Any

from slipstream.advisor.exchanges import Exchanges
from slipstream.advisor.findings import Finding, merged
from slipstream.advisor.split_model import SplitModel
from slipstream.advisor.trace_stats import TraceStats
from slipstream.analysis.time_unit import format_seconds
from slipstream.planner.split import Cuts

LATENCY_BOUND = 0.5
"""Startups, as a share of the time of all exchanges."""
LATE = 0.25
"""Time in which gradients wait and no exchange runs, as a share of backward."""


def move_cut_later(stats: TraceStats) -> Finding | None:
    """Scenario 1: all exchanges but the last are hidden, and the last one is long.

    Fires when a split with no more segments gains enough. Gain: ``finish(traced) - finish(best)``,
    at most the tail.
    """
    exchanges = _splittable(stats)
    if exchanges is None or len(exchanges.best_cuts) > len(exchanges.cuts):
        return None
    if _first_exposed(stats, exchanges) is not None:
        return None
    return _resplit(
        stats,
        f"All exchanges but the last end within backward. The last one, of "
        f"{exchanges.num_bytes[-1] / 1e6:.2f} MB, continues for {format_seconds(exchanges.tail)} "
        "after it.",
        "Move the cut later, so that the last exchange has fewer bytes",
    )


def move_cut_earlier(stats: TraceStats) -> Finding | None:
    """Scenario 2: an exchange before the last one ends after backward.

    Fires when a split with no more segments gains enough. Gain: ``finish(traced) - finish(best)``,
    at most the tail.
    """
    exchanges = _splittable(stats)
    if exchanges is None or len(exchanges.best_cuts) > len(exchanges.cuts):
        return None
    index = _first_exposed(stats, exchanges)
    if index is None:
        return None
    late = exchanges.spans[index][1] - exchanges.backward
    return _resplit(
        stats,
        f"Exchange {index + 1} of {len(exchanges.cuts)} ends {format_seconds(late)} after "
        f"backward, the last one {format_seconds(exchanges.tail)}.",
        "Move cuts earlier, so that exchanges start sooner",
    )


def add_segments(stats: TraceStats) -> Finding | None:
    """Scenario 3: compute is long, and no split with as many segments as now is good enough.

    Fires when more segments gain enough beyond the best split with as many as now. Gain:
    ``finish(traced) - finish(best)``, at most the tail.
    """
    exchanges = _splittable(stats)
    if exchanges is None or len(exchanges.best_cuts) <= len(exchanges.cuts):
        return None
    return _resplit(
        stats,
        f"Exchanges continue for {format_seconds(exchanges.tail)} after backward. No split "
        f"makes {_segments(exchanges.cuts)} as good as {len(exchanges.best_cuts)}.",
        "Use more segments",
    )


def join_segments(stats: TraceStats) -> Finding | None:
    """Segments are too small: startups take more than half of the time of all exchanges.

    Fires when fewer segments gain enough. Gain: ``finish(traced) - finish(best)``, at most the
    tail.
    """
    exchanges = _splittable(stats)
    if exchanges is None or len(exchanges.best_cuts) >= len(exchanges.cuts):
        return None
    model = exchanges.model
    assert model is not None, "without a model there is no gain"
    startups, total = len(exchanges.cuts) * model.seconds([1]), model.seconds(exchanges.num_bytes)
    if startups <= LATENCY_BOUND * total:
        return None
    return _resplit(
        stats,
        f"{_segments(exchanges.cuts)} take {format_seconds(total)}, of which "
        f"{min(startups / total, 1):.0%} is startup, the same for every size.",
        "Put more gradients into one exchange",
    )


def start_earlier(stats: TraceStats) -> Finding | None:
    """Segments are too large: ready gradients wait in more than a quarter of backward.

    Fires when another split gains enough. Gain: ``finish(traced) - finish(best)``, at most the
    tail.
    """
    exchanges = _splittable(stats)
    if exchanges is None or exchanges.idle <= LATE * exchanges.backward:
        return None
    return _resplit(
        stats,
        f"In {format_seconds(exchanges.idle)} of the {format_seconds(exchanges.backward)} of "
        "backward, gradients wait for their segment to fill while no exchange runs.",
        "Let the first exchange start sooner",
    )


def overlap_exchange(stats: TraceStats) -> Finding | None:
    """Fires when overlap is off and turning it on gains enough.

    Gain: ``backward + total(traced) - finish(traced)``, at most the tail; with ``finish(best)``,
    and its split in the patch, if that gains enough more.
    """
    exchanges = stats.exchanges
    if stats.overlap or exchanges is None or exchanges.model is None:
        return None
    model, cuts = exchanges.model, exchanges.cuts
    patch: dict[str, Any] = {"gradients": {"overlap": True}}
    advice = "Exchange during backward"
    if model.finish(cuts) - model.finish(exchanges.best_cuts) >= stats.worthwhile:
        cuts = exchanges.best_cuts
        patch = merged(patch, _split_patch(cuts))
        advice += f", as {_described(model, cuts)}"
    total = model.seconds(model.sizes_of(exchanges.cuts))
    gain = min(exchanges.tail, exchanges.backward + total - model.finish(cuts))
    if gain < stats.worthwhile:
        return None
    return Finding(
        stats.severity(gain),
        "gradients.overlap",
        f"Overlap is off: exchanges take {format_seconds(exchanges.tail)} after backward.",
        f"{advice}.",
        gain,
        patch,
    )


def _splittable(stats: TraceStats) -> Exchanges | None:
    """The exchanges, if they overlap backward and another split gains enough."""
    exchanges = stats.exchanges
    enough = exchanges is not None and exchanges.gain >= stats.worthwhile
    return exchanges if stats.overlap and enough else None


def _first_exposed(stats: TraceStats, exchanges: Exchanges) -> int | None:
    """The first exchange before the last that ends after backward, beyond the clocks' error."""
    ends = [end - exchanges.backward for _, end in exchanges.spans[:-1]]
    late = [index for index, end in enumerate(ends) if end > 0]
    return late[0] if late and max(ends) > stats.clock_error else None


def _resplit(stats: TraceStats, evidence: str, advice: str) -> Finding:
    """The finding that advises the best split."""
    exchanges = stats.exchanges
    assert exchanges is not None
    assert exchanges.model is not None, "without a model there is no gain"
    advice = f"{advice}: {_described(exchanges.model, exchanges.best_cuts)}."
    patch, gain = _split_patch(exchanges.best_cuts), exchanges.gain
    return Finding(stats.severity(gain), "gradients.split", evidence, advice, gain, patch)


def _split_patch(cuts: Cuts) -> dict[str, Any]:
    return {"gradients": {"split": {"kind": "by_index", "last": [cut - 1 for cut in cuts]}}}


def _described(model: SplitModel, cuts: Cuts) -> str:
    sizes = [f"{size / 1e6:.2f}" for size in model.sizes_of(cuts)]
    shown = ", ".join(sizes[:8]) + (" ..." if len(sizes) > 8 else "")
    return f"{_segments(cuts)} of {shown} MB"


def _segments(cuts: Cuts) -> str:
    return "1 segment" if len(cuts) == 1 else f"{len(cuts)} segments"
