"""From a trace to findings: what slows the run down, what to do, and what that should bring.

Never measures and never changes a strategy: every finding may carry a patch, to be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import get_args

from slipstream.advisor.findings import Finding, Severity
from slipstream.advisor.rules import (
    accumulate,
    distrust_clocks,
    even_ranks,
    feed_faster,
    lighten_optimizer,
    miss_sizes,
    miss_steps,
    send_less,
)
from slipstream.advisor.split_rules import (
    add_segments,
    join_segments,
    move_cut_earlier,
    move_cut_later,
    overlap_exchange,
    start_earlier,
)
from slipstream.advisor.trace_stats import TraceStats, facts
from slipstream.analysis.throughput import compute_share
from slipstream.trace.event import Trace

RULES: tuple[Callable[[TraceStats], Finding | None], ...] = (
    move_cut_later,
    move_cut_earlier,
    add_segments,
    join_segments,
    start_earlier,
    overlap_exchange,
    feed_faster,
    even_ranks,
    lighten_optimizer,
    accumulate,
    send_less,
    distrust_clocks,
    miss_steps,
    miss_sizes,
)


def advise(trace: Trace, seconds_of: Callable[[float], float] | None = None) -> list[Finding]:
    """Findings by gain, the largest first; one that says "good" where there is nothing to mend.

    Rules that come to the same patch make one finding with the evidence of all.

    Args:
        trace: Of one run; of several iterations, if it is to be trusted.
        seconds_of: Seconds of one all-reduce over the bytes of its tensor on one rank; None: fitted
            to the exchanges of the trace, which tells less of sizes that are not among them.

    Raises:
        TraceError: there is no iteration that all ranks recorded, or ranks disagree about what they
            exchanged.

    Example:
        >>> from slipstream.trace.event import Event
        >>> trace = Trace((Event("iteration", 0, 2, 0.0, 0.5), Event("data_wait", 0, 2, 0.0, 0.3)))
        >>> [(finding.severity, finding.where, finding.gain) for finding in advise(trace)]
        [('problem', 'data', 0.3)]
    """
    known = facts(trace, seconds_of)
    found = _joined(finding for rule in RULES if (finding := rule(known)) is not None)
    if all(finding.severity == "note" for finding in found):
        found.append(_nothing_to_do(known))
    grave = get_args(Severity)
    return sorted(found, key=lambda f: (f.gain, grave.index(f.severity)), reverse=True)


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with the same patch as one."""
    found: list[Finding] = []
    for finding in findings:
        for index, earlier in enumerate(found):
            if finding.patch and finding.patch == earlier.patch:
                found[index] = replace(earlier, evidence=f"{earlier.evidence} {finding.evidence}")
                break
        else:
            found.append(finding)
    return found


def _nothing_to_do(known: TraceStats) -> Finding:
    return Finding(
        "good",
        "iteration",
        f"Forward, backward and optimizer take {compute_share(known.typical):.0%} of an iteration; "
        f"exposed exchange is {known.share(known.median('exposed'))}, the wait for data "
        f"{known.share(known.median('data_wait'))}.",
        "Nothing here promises another 1 %. More would come from faster compute.",
    )
