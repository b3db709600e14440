"""The numbers of one traced step: work by rank, and when each gradient was ready.

``workload`` makes typical values of many steps from them; its note on contention explains work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.analysis.breakdown import breakdown
from slipstream.errors import TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.fit import Array
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, Event, Trace
from slipstream.trace.intervals import Intervals, union
from slipstream.trace.timeline import Iteration, timeline

Step = Sequence[Iteration]
"""The iterations of all ranks in one step, by rank."""


def complete_steps(trace: Trace) -> list[list[Iteration]]:
    """The steps that every rank of the trace went through, each with a backward pass.

    Raises:
        TraceError: there is none, or ranks exchanged different things in one step.
    """
    by_step: dict[int, list[Iteration]] = defaultdict(list)
    for iteration in timeline(trace.events):
        if iteration.during(BACKWARD):
            by_step[iteration.step].append(iteration)
    ranks = {iteration.rank for step in by_step.values() for iteration in step}
    steps = [step for step in by_step.values() if len(step) == len(ranks)]
    if not steps:
        raise TraceError(
            "the trace has no step with a backward pass on every rank, so nothing can be planned "
            "from it; set trace.steps in the strategy to steps that the training reaches"
        )
    for step in steps:
        names = {tuple(event.name for event in one.exchanges) for one in step}
        if len(names) > 1:
            raise TraceError(
                f"the ranks disagree about what they exchanged in step {step[0].step} "
                f"({' against '.join(str(len(n)) for n in names)} exchanges); the file is damaged "
                "or put together from different runs: record it again"
            )
    return steps


def in_flight(step: Step) -> list[tuple[float, float]]:
    """Start and end of each exchange of a step; it starts when the last rank has handed it over."""
    by_exchange = zip(*(one.exchanges for one in step), strict=True)
    return [(max(e.start for e in same), max(e.end for e in same)) for same in by_exchange]


def measure(step: Step, gradients: Sequence[Gradient], slowdown: float) -> dict[str, Array]:
    """Work of one step by rank; ``marks``: when each gradient was ready and backward ended.

    Args:
        step: all ranks.
        gradients: in ready order.
        slowdown: compute takes ``1 + slowdown`` times as long while an exchange is in flight.
    """
    work = _Work(union(in_flight(step)), slowdown)
    rows: dict[str, list[Any]] = defaultdict(list)
    for one in step:
        backwards = [event for event in one.events if event.name == BACKWARD]
        last, passes = backwards[-1], len(backwards)
        for name, event_name in (("data_wait", DATA_WAIT), ("forward", FORWARD)):
            rows[name].append(work.spent(one, event_name) / passes)
        rows["optimizer"].append(work.spent(one, OPTIMIZER))
        rows["other"].append(breakdown(one).parts.other)
        rows["samples"].append(one.samples / passes)
        rows["passes"].append(passes)
        rows["start"].append(work.at(one.start))
        offsets = _ready_offsets(last, one, gradients)
        rows["marks"].append(work.at(last.start + np.append(offsets, last.duration)))
    return {name: np.array(values, dtype=np.float64) for name, values in rows.items()}


class _Work:
    """The clock of compute: it runs at ``1 / (1 + slowdown)`` while an exchange is in flight."""

    def __init__(self, exchanging: Intervals, slowdown: float) -> None:
        self._edges = np.array([edge for interval in exchanging for edge in interval] or [0.0])
        lengths = np.diff(self._edges, prepend=self._edges[0])
        lengths[::2] = 0.0  # the even ones lie between exchanges
        self._covered = np.cumsum(lengths)
        self._lost = slowdown / (1.0 + slowdown)

    def at(self, time: float | Array) -> Any:
        """The work at a time."""
        return time - self._lost * np.interp(time, self._edges, self._covered)

    def spent(self, iteration: Iteration, name: str) -> float:
        """The work in the spans of one name."""
        spans = [event for event in iteration.events if event.name == name]
        return float(sum(self.at(span.end) - self.at(span.start) for span in spans))


def _ready_offsets(backward: Event, iteration: Iteration, gradients: Sequence[Gradient]) -> Array:
    """Seconds from the start of backward until each gradient was ready; its end for unused ones.

    Ranks without exchanges record no ready times: there they are interpolated by bytes.
    """
    recorded = backward.args.get("gradients_ready")
    if recorded is None:
        done = np.cumsum([gradient.num_bytes + 1.0 for gradient in gradients])  # sparse ones have 0
        return np.asarray(backward.duration * done / done[-1])
    if len(recorded) != len(gradients):
        raise TraceError(
            f"rank {iteration.rank}, step {iteration.step}: {len(recorded)} ready times, but "
            f"{len(gradients)} gradients; the file is damaged or put together from different "
            "runs: record it again"
        )
    return np.array([backward.duration if at is None else at for at in recorded], dtype=np.float64)
