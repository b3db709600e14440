"""The advisor's other rules: from the facts of a run to a finding, or None.

Never measures and never acts. Each rule says when it speaks, and how it computes the gain.
"""

from __future__ import annotations

from slipstream.advisor.exchanges import Exchanges
from slipstream.advisor.findings import Finding
from slipstream.advisor.trace_stats import TraceStats
from slipstream.analysis.ascii_timeline import timing

STARVED = 0.1
"""Share of an iteration in which data is waited for."""
UNEVEN = 0.05
"""Share of an iteration between the first and the last rank."""
OPTIMIZER_HEAVY = 0.1
"""Share of an iteration."""
EXPOSED = 0.5
"""Exposed exchange as a share of compute, from which on to exchange less often."""
MOST_PASSES = 8
CLOCKS_OFF = 0.01
"""Share of an iteration."""


def feed_faster(facts: TraceStats) -> Finding | None:
    """Data is waited for in more than a tenth of an iteration. Gain: the wait."""
    wait = facts.typical.spread("data_wait")
    if wait.median <= STARVED * facts.iteration:
        return None
    return Finding(
        facts.severity(wait.median),
        "data",
        f"The loader lets the model wait for {timing(wait.median)}, {facts.share(wait.median)}; "
        f"{timing(wait.high)} on rank {wait.slowest}.",
        "Load in more worker processes that stay alive (num_workers, persistent_workers), prefetch "
        "further, or do less for each sample: decode and resize the data once, beforehand.",
        wait.median,
    )


def even_ranks(facts: TraceStats) -> Finding | None:
    """Ranks wait for the last one, at more than 5 % of an iteration between first and last.

    Gain: the excess of the worst straggler over the median of the others; where no rank is
    persistently slow, how much later than the median the last rank has its gradients.
    """
    found = facts.exchanges
    if found is None or found.skew <= max(UNEVEN * facts.iteration, facts.clock_error):
        return None
    seen = f"The first rank waits {timing(found.skew)} for the last one's gradients"
    if not facts.stragglers:
        return Finding(
            facts.severity(found.lag),
            "ranks",
            f"{seen}, {facts.share(found.skew)}; which rank is last changes.",
            "Give all ranks the same work in each step: equal batches, samples of varying length "
            "dealt out by their cost. Ranks that share a host need cores of their own.",
            found.lag,
        )
    worst = facts.stragglers[0]
    phase = worst.phase.replace("_", " ")
    return Finding(
        facts.severity(worst.seconds),
        f"rank {worst.rank}, {phase}",
        f"{seen}, {facts.share(found.skew)}. Rank {worst.rank} takes "
        f"{timing(worst.usual + worst.seconds)} for {phase}, the others {timing(worst.usual)}, in "
        f"{worst.iterations} of {worst.of} steps.",
        "Give this rank the same batch as the others, and see what else its host does: other "
        "processes, fewer cores, a hot or slower processor, a slower disk.",
        worst.seconds,
    )


def lighten_optimizer(facts: TraceStats) -> Finding | None:
    """The optimizer takes more than a tenth of an iteration. Gain: not known from a trace."""
    seconds = facts.median("optimizer")
    if seconds <= OPTIMIZER_HEAVY * facts.iteration:
        return None
    parameters = f" for {facts.num_gradients} parameters" if facts.num_gradients else ""
    return Finding(
        "warning",
        "optimizer",
        f"The optimizer takes {timing(seconds)}{parameters}, {facts.share(seconds)}.",
        "Let it update all parameters in one go: fused=True (or foreach=True) where torch's "
        "optimizer has it.",
    )


def accumulate(facts: TraceStats) -> Finding | None:
    """Even at the best split, exchanges that nothing hides take more than half of compute.

    Speaks with the smallest of 2, 4, 8 passes after which they take no more than that of the
    compute of a window, or with 8. Gain, for each of today's batches: ``(1 - 1 / passes) * (exposed
    + optimizer)``. It is a note: a larger batch is another training recipe.
    """
    found = facts.exchanges
    if found is None:
        return None
    exposed = min(facts.median("exposed"), _exposed_at_best(found))
    if exposed <= EXPOSED * facts.compute or not facts.compute:
        return None
    enough = (n for n in (2, 4) if exposed <= EXPOSED * n * facts.compute)
    passes = next(enough, MOST_PASSES)
    return Finding(
        "note",
        "gradients.accumulate",
        f"Exchanges that nothing hides take {timing(exposed)} at the best split, compute "
        f"{timing(facts.compute)}.",
        f"Exchange once in {passes} backward passes, if the training allows it. This changes the "
        f"recipe: an update sees a batch {passes} times as large, there are that many fewer of "
        "them, and learning rate and warm-up have to be chosen anew.",
        (1 - 1 / passes) * (exposed + facts.median("optimizer")),
        {"gradients": {"accumulate": passes * facts.accumulate}},
    )


def send_less(facts: TraceStats) -> Finding | None:
    """Exchanges take longer than compute: no split hides them.

    Gain: half of their time, at most the tail, as if gradients had half the bytes.
    """
    found = facts.exchanges
    if found is None or found.busy <= facts.compute:
        return None
    return Finding(
        "note",
        "network",
        f"The network is busy for {timing(found.busy)}, compute takes {timing(facts.compute)}: "
        "no split hides all of it.",
        "Only fewer bytes or faster links help. The gain is that of half the bytes, as with "
        "gradients in 16 bits, which rounds them.",
        min(found.tail, found.busy / 2),
    )


def distrust_clocks(facts: TraceStats) -> Finding | None:
    """The clocks of two ranks may be off by more than 1 % of an iteration."""
    if facts.clock_error <= CLOCKS_OFF * facts.iteration:
        return None
    return Finding(
        "warning",
        "clocks",
        f"Times of two ranks may be off by {timing(facts.clock_error)}, "
        f"{facts.share(facts.clock_error)}.",
        "Do not trust what compares ranks: skew, stragglers, and when the last rank is ready. "
        "Record again while the network carries nothing else.",
    )


def miss_steps(facts: TraceStats) -> Finding | None:
    """Ranks recorded other steps than the others, or none."""
    if not facts.lacking:
        return None
    more = f", and {len(facts.lacking) - 3} more ranks" if len(facts.lacking) > 3 else ""
    return Finding(
        "problem",
        "trace",
        f"Ranks are missing: {', '.join(facts.lacking[:3])}{more}.",
        "All else here is about the steps that every rank has. See the logs of these ranks for "
        "why they stopped, and record again.",
    )


def miss_sizes(facts: TraceStats) -> Finding | None:
    """The trace does not tell the gradients' sizes, so there is no advice about the split."""
    if facts.exchanges is None or facts.exchanges.queue is not None:
        return None
    return Finding(
        "note",
        "trace",
        "The trace does not tell the size of each gradient, as older ones do not.",
        "Record again for advice about the split.",
    )


def _exposed_at_best(found: Exchanges) -> float:
    """What the best split would leave after backward; the tail where there is no model."""
    if found.queue is None:
        return found.tail
    return max(0.0, found.queue.finish(found.wanted) - found.backward)
