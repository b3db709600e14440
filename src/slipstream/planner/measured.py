"""The numbers of one traced step: work by rank, and when each gradient was there.

Never says what is typical of many steps (``workload`` does); the note on contention there explains
what work is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.analysis.breakdown import breakdown
from slipstream.errors import TraceError
from slipstream.gradients.layout import Gradient
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, Event, Trace
from slipstream.trace.intervals import Intervals, union
from slipstream.trace.timeline import Iteration, timeline

Array = NDArray[np.float64]


def complete_steps(trace: Trace) -> list[list[Iteration]]:
    """The iterations of each step that every rank of the trace went through, by rank.

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
            "from it; let trace.steps in the strategy name steps that the training reaches"
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


def moving(step: Sequence[Iteration]) -> list[tuple[float, float]]:
    """Start and end of each exchange of a step: it moves once the last rank has handed it over."""
    by_exchange = zip(*(one.exchanges for one in step), strict=True)
    return [(max(e.start for e in same), max(e.end for e in same)) for same in by_exchange]


def measure(
    step: Sequence[Iteration],
    gradients: Sequence[Gradient],
    segments: Sequence[int],
    slowdown: float,
) -> dict[str, Array]:
    """Work of one step by rank; ``marks``: when each gradient was there and backward ended."""
    work = _Work(union(moving(step)), slowdown)
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
        offsets = _ready_offsets(last, one, gradients, segments)
        rows["marks"].append(work.at(last.start + np.append(offsets, last.duration)))
    return {name: np.array(values, dtype=np.float64) for name, values in rows.items()}


class _Work:
    """The clock of compute: it goes at ``1 / (1 + slowdown)`` while an exchange moves."""

    def __init__(self, moving: Intervals, slowdown: float) -> None:
        self._edges = np.array([edge for interval in moving for edge in interval] or [0.0])
        lengths = np.diff(self._edges, prepend=self._edges[0])
        lengths[::2] = 0.0  # up to a start: the time between exchanges
        self._covered = np.cumsum(lengths)
        self._lost = slowdown / (1.0 + slowdown)

    def at(self, time: float | Array) -> Any:
        """Work at a time."""
        return time - self._lost * np.interp(time, self._edges, self._covered)

    def spent(self, iteration: Iteration, name: str) -> float:
        """Work in the spans of one name."""
        spans = [event for event in iteration.events if event.name == name]
        return float(sum(self.at(span.end) - self.at(span.start) for span in spans))


def _ready_offsets(
    backward: Event, iteration: Iteration, gradients: Sequence[Gradient], segments: Sequence[int]
) -> Array:
    """Seconds from the start of backward until each gradient was there; its end if never."""
    known = backward.args.get("gradients_ready")
    if known is None:
        return _interpolated(backward, iteration, gradients, segments)
    if len(known) != len(gradients):
        raise TraceError(
            f"rank {iteration.rank}, step {iteration.step}: {len(known)} ready times, but "
            f"{len(gradients)} gradients; the file is damaged or put together from different "
            "runs: record it again"
        )
    return np.array([backward.duration if at is None else at for at in known], dtype=np.float64)


def _interpolated(
    backward: Event, iteration: Iteration, gradients: Sequence[Gradient], segments: Sequence[int]
) -> Array:
    """Ready times by bytes between the start of backward, full segments, and its end."""
    done = np.cumsum([gradient.num_bytes + 1.0 for gradient in gradients])  # no bytes: by index
    share, at = [0.0], [0.0]
    full = {event.args["segment"]: event for event in iteration.exchanges if "ready" in event.args}
    for number, stop in enumerate(np.cumsum(segments, dtype=np.intp)):
        ready = full[number].args["ready"] - backward.start if number in full else np.inf
        if ready < backward.duration:  # else sent after backward, which says nothing
            share.append(float(done[stop - 1]))
            at.append(max(at[-1], ready))
    if share[-1] < done[-1]:
        share.append(float(done[-1]))
        at.append(backward.duration)
    return np.asarray(np.interp(done, share, at))
