"""Turns a trace into findings: what slows the run down, what to do, and what that should gain.

Changes no strategy: a finding may carry a patch for the caller to merge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from slipstream.advisor import exchange_rules, rules
from slipstream.advisor.findings import Finding, Severity
from slipstream.advisor.trace_stats import WORTHWHILE, TraceStats, trace_stats
from slipstream.analysis.throughput import compute_share
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.ranking import MARGIN
from slipstream.trace.event import Trace

RULES: tuple[Callable[[TraceStats], Finding | None], ...] = (
    exchange_rules.exchange_otherwise,
    exchange_rules.send_less,
    exchange_rules.accumulate,
    rules.feed_faster,
    rules.even_ranks,
    rules.gather_less,
    rules.lighten_optimizer,
    rules.look_outside,
    rules.distrust_clocks,
    rules.miss_steps,
    rules.miss_sizes,
)
"""Findings of equal gain and severity appear in this order."""


def advise(trace: Trace, network: NetworkProfile | None = None) -> list[Finding]:
    """Findings by gain, the largest first; one of severity "good" if nothing needs a change.

    Args:
        trace: Of one run. Several iterations make the findings reliable.
        network: What exchanges cost, as measured. None: a line fitted to the exchanges of the
            trace, which is less reliable for other sizes, and knows neither other transports nor
            codecs.

    Raises:
        TraceError: There is no iteration that all ranks recorded, or ranks disagree about what they
            exchanged.
        ClusterError: The network is that of another number of ranks.

    Example:
        >>> from slipstream.trace.event import Event
        >>> trace = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("data_wait", 0, 2, 0.0, 0.48)))
        >>> [(finding.severity, finding.where, finding.gain) for finding in advise(trace)]
        [('problem', 'data', 0.48)]
    """
    stats = trace_stats(trace, network)
    findings = [finding for rule in RULES if (finding := rule(stats)) is not None]
    if all(finding.severity == "note" for finding in findings):
        findings.append(_nothing_to_do(stats))
    severities = get_args(Severity)
    return sorted(findings, key=lambda f: (f.gain, severities.index(f.severity)), reverse=True)


def _nothing_to_do(stats: TraceStats) -> Finding:
    return Finding(
        "good",
        "iteration",
        f"Forward, backward and optimizer take {compute_share(stats.typical):.0%} of an iteration; "
        f"exposed exchange is {stats.share(stats.typical_seconds('exposed'))}, the wait for data "
        f"{stats.share(stats.typical_seconds('data_wait'))}.",
        f"No change promises a gain of {WORTHWHILE:.0%}, or of {MARGIN:.0%} by prediction. "
        "Faster compute would.",
    )
