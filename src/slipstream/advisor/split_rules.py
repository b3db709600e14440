"""The advisor's rules about splits: from the facts of a run to a finding with a new split, or None.

Never measures and never acts. Each rule says when it speaks, and how it computes the gain. What a
split that was not traced would take comes from the model in ``splits.Queue``: ready times as they
were, one exchange at a time, in order. It does not know that exchanges slow down compute.
Source: Huawei, CANN TensorFlow tuning guide, gradient segmentation (the three scenarios).
"""

from __future__ import annotations

from slipstream.advisor.exchanges import Exchanges
from slipstream.advisor.findings import Finding, merged
from slipstream.advisor.splits import Cuts, by_index
from slipstream.advisor.trace_stats import TraceStats
from slipstream.analysis.ascii_timeline import timing

LATENCY_BOUND = 0.5
"""Share of the startups in the time of all exchanges."""
LATE = 0.25
"""Share of backward in which nothing moves though gradients wait."""


def move_cut_later(facts: TraceStats) -> Finding | None:
    """Scenario 1: all before the last exchange is hidden, and the last one is long.

    Speaks where that is so and a split of no more segments brings what is worthwhile. Gain:
    ``finish(traced) - finish(wanted)``, at most the tail.
    """
    found = _worth_splitting(facts)
    if found is None or len(found.wanted) > len(found.cuts) or _runs_over(facts, found):
        return None
    return _resplit(
        facts,
        found,
        f"All exchanges but the last end within backward. The last one, of "
        f"{found.num_bytes[-1] / 1e6:.2f} MB, goes on for {timing(found.tail)} after it.",
        "Move the cut later, so that the last exchange carries less",
    )


def move_cut_earlier(facts: TraceStats) -> Finding | None:
    """Scenario 2: an exchange before the last runs past the end of backward.

    Speaks where that is so and a split of no more segments brings what is worthwhile. Gain:
    ``finish(traced) - finish(wanted)``, at most the tail.
    """
    found = _worth_splitting(facts)
    if found is None or len(found.wanted) > len(found.cuts) or not _runs_over(facts, found):
        return None
    ends = [end for _, end in found.spans[:-1]]
    late = next(index for index, end in enumerate(ends) if end > found.backward)
    return _resplit(
        facts,
        found,
        f"Exchange {late + 1} of {len(found.cuts)} ends {timing(ends[late] - found.backward)} "
        f"after backward, the last one {timing(found.tail)}.",
        "Move cuts earlier, so that exchanges start sooner",
    )


def add_segments(facts: TraceStats) -> Finding | None:
    """Scenario 3: compute is long, and as many segments as now do not serve, wherever they end.

    Speaks where more segments bring what is worthwhile beyond the best split of as many as now.
    Gain: ``finish(traced) - finish(wanted)``, at most the tail.
    """
    found = _worth_splitting(facts)
    if found is None or len(found.wanted) <= len(found.cuts):
        return None
    return _resplit(
        facts,
        found,
        f"Exchanges go on for {timing(found.tail)} after backward, and no place of the cuts "
        f"makes {_segments(found.cuts)} as good as {len(found.wanted)}.",
        "Cut more often",
    )


def join_segments(facts: TraceStats) -> Finding | None:
    """Segments are too small: startups take more than half of the time of all exchanges.

    Speaks where that is so and fewer segments bring what is worthwhile. Gain:
    ``finish(traced) - finish(wanted)``, at most the tail.
    """
    found = _worth_splitting(facts)
    if found is None or len(found.wanted) >= len(found.cuts):
        return None
    startups = len(found.cuts) * found.seconds_of(1)
    total = sum(map(found.seconds_of, found.num_bytes))
    if startups <= LATENCY_BOUND * total:
        return None
    return _resplit(
        facts,
        found,
        f"{_segments(found.cuts)} take {timing(total)}, of which {min(startups / total, 1):.0%} is "
        "startup, the same for every size.",
        "Let more gradients share an exchange",
    )


def start_earlier(facts: TraceStats) -> Finding | None:
    """Segments are too large: in much of backward gradients wait, and nothing moves.

    Speaks where that is more than a quarter of backward and another split brings what is
    worthwhile. Gain: ``finish(traced) - finish(wanted)``, at most the tail.
    """
    found = _worth_splitting(facts)
    if found is None or found.idle <= LATE * found.backward:
        return None
    return _resplit(
        facts,
        found,
        f"In {timing(found.idle)} of the {timing(found.backward)} of backward gradients waited for "
        "their segment to fill, and nothing moved.",
        "Let the first exchange start sooner",
    )


def overlap_exchange(facts: TraceStats) -> Finding | None:
    """Exchanges wait for the end of backward.

    Speaks where overlap is off, and on it brings what is worthwhile. Gain: ``backward +
    total(traced) - finish(traced)``, at most the tail; with ``finish(wanted)``, and its split in
    the patch, where that is worth more.
    """
    found = facts.exchanges
    if facts.overlap or found is None or found.queue is None:
        return None
    queue, cuts, patch = found.queue, found.cuts, {"gradients": {"overlap": True}}
    advice = "Exchange while backward still runs"
    if queue.finish(cuts) - queue.finish(found.wanted) >= facts.worthwhile:
        cuts, patch = found.wanted, merged(patch, by_index(found.wanted))
        advice += f", as {_described(found, cuts)}"
    gain = min(found.tail, found.backward + queue.total(found.cuts) - queue.finish(cuts))
    if gain < facts.worthwhile:
        return None
    return Finding(
        facts.severity(gain),
        "gradients.overlap",
        f"Overlap is off: exchanges take {timing(found.tail)} after backward.",
        f"{advice}.",
        gain,
        patch,
    )


def _worth_splitting(facts: TraceStats) -> Exchanges | None:
    """The exchanges, where they overlap and another split brings what is worthwhile."""
    found = facts.exchanges
    return found if found and facts.overlap and found.gain >= facts.worthwhile else None


def _runs_over(facts: TraceStats, found: Exchanges) -> bool:
    """Whether an exchange before the last ends after backward."""
    return any(end > found.backward + facts.clock_error for _, end in found.spans[:-1])


def _resplit(facts: TraceStats, found: Exchanges, evidence: str, advice: str) -> Finding:
    return Finding(
        facts.severity(found.gain),
        "gradients.split",
        evidence,
        f"{advice}: {_described(found, found.wanted)}.",
        found.gain,
        by_index(found.wanted),
    )


def _described(found: Exchanges, cuts: Cuts) -> str:
    sizes = [f"{size / 1e6:.2f}" for size in found.sizes_of(cuts)]
    shown = ", ".join(sizes[:8]) + (" ..." if len(sizes) > 8 else "")
    return f"{_segments(cuts)} of {shown} MB"


def _segments(cuts: Cuts) -> str:
    return "1 segment" if len(cuts) == 1 else f"{len(cuts)} segments"
