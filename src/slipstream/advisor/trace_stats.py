"""Computes what the advisor's rules look at: the typical iteration of the run in a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from slipstream.advisor.exchanges import Exchanges, RanksOfStep, layout_of, typical_exchanges
from slipstream.advisor.findings import Severity
from slipstream.advisor.what_if import WhatIf
from slipstream.analysis.breakdown import TypicalIteration, typical_iteration
from slipstream.analysis.data import Queue, idle_share, queue
from slipstream.analysis.stragglers import SLOWER, Straggler, stragglers
from slipstream.errors import SlipstreamError, TraceError
from slipstream.planner.iteration.traced import gradients_of
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search.ranking import MARGIN
from slipstream.trace.event import DATA_WAIT, FULLY_SHARD, Framework, Trace
from slipstream.trace.timeline import Iteration, timeline

WORTHWHILE = 0.01
"""Advice must gain this share of an iteration."""
PROBLEM = 0.1
"""A finding that costs this share of an iteration is a problem, below it a warning."""


class TraceStats(NamedTuple):
    """Figures of a run, read from its trace.

    Attributes:
        typical: The typical iteration and its parts.
        stragglers: Ranks that are slower than the others.
        waiting_for_cores: Those of them that compute no longer than others of their host do, by
            their CPU time: they wait for cores.
        exchanges: None if nothing was exchanged, or under FSDP2.
        overlap: Whether exchanges may run during backward.
        accumulate: Backward passes of one update.
        num_gradients: 0 if unknown.
        clock_error: The most by which times of two ranks may be off, in seconds.
        worthwhile: The least gain in seconds that advice must bring: 1 % of an iteration, and no
            less than ``clock_error``.
        what_if: Predictions of other strategies; None if nothing was exchanged, or for the reason
            in ``unpredicted``.
        queue: Batches that are read beside the training; None: none is, or it is not known.
        idle: The share of the ranks' forward and backward that they would wait for the slowest.
        prefetchable: Whether the loader's batches can be read ahead, and are not yet.
        resizable: Whether ``data.prefetch`` sets how many read.
        balanceable: Whether samples have lengths by which they can be dealt, and are not yet.
        missing_steps: A sentence for each rank that recorded fewer steps than others.
        framework: Whose loop trains by a session.
        fully_shard: Whether the trace is of torch's FSDP2, not of a session.
    """

    typical: TypicalIteration
    stragglers: tuple[Straggler, ...]
    waiting_for_cores: tuple[Straggler, ...]
    exchanges: Exchanges | None
    overlap: bool
    accumulate: int
    num_gradients: int
    clock_error: float
    worthwhile: float
    what_if: WhatIf | None
    unpredicted: str
    queue: Queue | None
    idle: float
    prefetchable: bool
    resizable: bool
    balanceable: bool
    missing_steps: tuple[str, ...]
    framework: Framework
    fully_shard: bool = False

    def typical_seconds(self, part: str) -> float:
        """Seconds of a part of the iteration, of `IterationParts`: the mean over ranks."""
        return self.typical.spread(part).mean

    @property
    def iteration(self) -> float:
        """Seconds of an iteration."""
        return self.typical_seconds("iteration")

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.typical_seconds("forward") + self.typical_seconds("backward")

    @property
    def exposed_exchange(self) -> float:
        """Seconds of an iteration in which exchanges run without compute beside them: that of the
        typical rank, or after the backward of the last one. Exchanging otherwise saves no more."""
        tail = 0.0 if self.exchanges is None else self.exchanges.tail
        return max(self.typical_seconds("exposed"), tail)

    @property
    def predictable(self) -> float:
        """The least gain in seconds that a prediction must promise: what it may be off itself."""
        return max(self.worthwhile, MARGIN * self.iteration)

    def gain_of(self, workload: Workload) -> float:
        """Seconds that an iteration would be shorter with this workload, none if it were longer."""
        return 0.0 if self.what_if is None else max(self.what_if.gain_of(workload), 0.0)

    def severity(self, gain: float) -> Severity:
        """Severity of a finding with this gain: a problem from a tenth of an iteration on."""
        return "problem" if gain >= PROBLEM * self.iteration else "warning"

    def share(self, seconds: float) -> str:
        """Seconds as a share of the iteration, in words."""
        return f"{seconds / self.iteration if self.iteration else 0:.1%} of an iteration"


def trace_stats(trace: Trace, network: NetworkProfile | None = None) -> TraceStats:
    """The statistics of a trace; only steps that all ranks recorded count.

    Args:
        trace: Of one run.
        network: What exchanges cost; None: a line is fitted to the exchanges of the trace.

    Raises:
        TraceError: There is no iteration, none that all ranks recorded, or ranks disagree about
            the segments.
        ClusterError: The network is that of another number of ranks.
    """
    meta = trace.meta
    steps, missing_steps = _common_steps(timeline(trace.events), meta)
    iterations = [iteration for step in steps for iteration in step.values()]
    typical = typical_iteration(iterations)
    clock_error = max(meta.get("clock_error") or [0.0])
    worthwhile = max(WORTHWHILE * typical.spread("iteration").mean, clock_error)
    sizes = [g.num_bytes for g in gradients_of(trace)] if meta.get("gradients") else []
    settings = trace.settings("gradients")
    fully_shard = meta.get("engine") == FULLY_SHARD
    exchanges = None if fully_shard else typical_exchanges(steps, sizes)
    # stages of a pipeline differ
    slow = () if trace.settings("parallel").get("pipeline") else stragglers(iterations, clock_error)
    waiting = tuple(one for one in slow if _waits_for_cores(one, meta))
    what_if, unpredicted = _predicted(trace, exchanges, network)
    return TraceStats(
        typical=typical,
        stragglers=tuple(one for one in slow if one not in waiting),
        waiting_for_cores=waiting,
        exchanges=exchanges,
        overlap=settings.get("overlap", True),
        accumulate=settings.get("accumulate", 1),
        num_gradients=len(sizes),
        clock_error=clock_error,
        worthwhile=worthwhile,
        what_if=what_if,
        unpredicted=unpredicted,
        queue=queue(iterations),
        idle=idle_share(iterations),
        prefetchable=bool(meta.get("prefetchable")),
        resizable=bool(meta.get("resizable")),
        balanceable=bool(meta.get("balanceable")),
        missing_steps=missing_steps,
        framework=trace.framework,
        fully_shard=fully_shard,
    )


def _waits_for_cores(one: Straggler, meta: Mapping[str, Any]) -> bool:
    """Whether a slow rank has the same work as others of its host, whose cores they share; one that
    waits for its data computes nothing meanwhile."""
    if one.phase == DATA_WAIT:
        return False
    hosts, cpu = meta.get("hosts") or (), meta.get("cpu_seconds") or ()
    if not len(hosts) == len(cpu) > one.rank:
        return False
    there = [rank for rank, host in enumerate(hosts) if host == hosts[one.rank]]
    others = [cpu[rank] for rank in there if rank != one.rank]
    return bool(others) and cpu[one.rank] <= (1 + SLOWER) * median(others)


def _predicted(
    trace: Trace, exchanges: Exchanges | None, network: NetworkProfile | None
) -> tuple[WhatIf | None, str]:
    """Predictions, or why there are none."""
    if network is not None:
        network.check_world(int(trace.meta.get("world_size", 1)))
    if exchanges is None:
        return None, ""
    if not exchanges.ready:
        return None, "it does not hold the size of each gradient; traces of older versions do not"
    try:
        return WhatIf.of(trace, exchanges, network), ""
    except SlipstreamError as error:
        return None, str(error)


def _common_steps(
    iterations: Iterable[Iteration], meta: Mapping[str, Any]
) -> tuple[list[RanksOfStep], tuple[str, ...]]:
    """The steps that all ranks recorded with the last step's layout, and what ranks miss."""
    by_step: dict[int, dict[int, Iteration]] = defaultdict(dict)
    for iteration in iterations:
        by_step[iteration.step][iteration.rank] = iteration
    ranks = {rank for step in by_step.values() for rank in step}
    # A simulated trace holds the events of some ranks only; a recorded one must hold all ranks.
    expected = ranks if meta.get("predicted") else ranks | set(range(meta.get("world_size", 0)))
    counts = {rank: sum(rank in step for step in by_step.values()) for rank in sorted(expected)}
    short = {rank: count for rank, count in counts.items() if count < len(by_step)}
    missing = tuple(f"rank {r} has {count} of {len(by_step)} steps" for r, count in short.items())
    common = [by_step[step] for step in sorted(by_step) if by_step[step].keys() == ranks]
    if not common:
        raise TraceError(
            f"no step was recorded by every rank ({'; '.join(missing)}), so ranks cannot be "
            "compared. Give the trace of one run, or record it again."
        )
    # Segments may change during a run (``split: optimal``): only the last layout is typical.
    layouts = [layout_of(step) for step in common]
    return [s for s, layout in zip(common, layouts, strict=True) if layout == layouts[-1]], missing
