"""What one event of a trace is: the names of the spans, their marks, and the trace that holds them.

Never measures, never reads or writes a file, and never sees torch: values only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

ITERATION = "iteration"
"""From the wait for a batch to the end of the update; every other span of a step lies inside."""

DATA_WAIT = "data_wait"
"""The loader has not delivered yet."""

BUFFERS = "buffers"
"""Broadcast of the model's buffers (batch norm statistics): an exchange, too."""

FORWARD = "forward"
"""The model and the loss."""

BACKWARD = "backward"
"""Compute of backward alone; a wait for exchanges after it is not part of it."""

OPTIMIZER = "optimizer"
"""The update of the parameters."""

STAGE_FORWARD = "stage_forward"
"""The forward of one pipeline stage on one micro-batch; the last stage computes the loss, too."""

STAGE_BACKWARD = "stage_backward"
"""The backward of one pipeline stage on one micro-batch, or the part of it for the inputs."""

STAGE_WEIGHT = "stage_weight"
"""The part of a stage's backward for its parameters, where the schedule runs it apart."""

_ALLREDUCE = re.compile(r"allreduce([1-9][0-9]*)\Z")


def allreduce(number: int) -> str:
    """Name of the span in which segment ``number`` (1 is exchanged first) is exchanged.

    Example:
        >>> allreduce(2)
        'allreduce2'
    """
    return f"allreduce{number}"


def exchange_order(name: str) -> int | None:
    """Place of an exchange in its iteration: 0 for buffers, else its segment; None: no exchange.

    Example:
        >>> [exchange_order(name) for name in ("buffers", "allreduce12", "forward")]
        [0, 12, None]
    """
    if name == BUFFERS:
        return 0
    match = _ALLREDUCE.match(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Event:
    """A span of time in one step of one rank.

    Times are seconds on the ``perf_counter`` clock of rank 0. An ``allreduceN`` carries the
    arguments ``segment``, ``bytes``, ``gradients`` (how many), ``collectives`` (how many) and
    ``ready``, the time at which the last gradient of its segment was there. ``ready`` is the one
    argument that is a time. A ``backward`` that ends in exchanges carries ``gradients_ready``: for
    each gradient, in ready order, the seconds from its start until it was there (None: it never
    came). The spans of a pipeline stage carry its number, ``stage``, and ``micro_batch``. An
    ``iteration`` carries ``samples``, how many this rank trained on (its share, where ranks share
    a model), where it is known. An operator
    of ``slipstream.comm`` carries ``bytes`` and ``ranks``, how many its group has.

    Example:
        >>> Event("allreduce1", rank=0, step=2, start=0.5, end=0.75, args={"bytes": 4096}).duration
        0.25
    """

    name: str
    rank: int
    step: int
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in time of one step of one rank; see ``marks`` for the names."""

    name: str
    rank: int
    step: int
    time: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Every event of every rank, ordered by start, and what they were measured on.

    ``meta`` holds plain JSON values, each of which may be missing: ``world_size``, ``hosts`` (by
    rank), ``model`` (its name), ``strategy`` (as a mapping), ``segments`` (a list of ``{"bytes",
    "gradients": [names]}``), ``gradients`` (in ready order, a list of ``{"name", "layer", "bytes",
    "dtype"}``; 0 bytes for a sparse one), ``versions`` (of torch and slipstream) and
    ``clock_error`` (by rank: the most by which a time of that rank can be off, in seconds).
    """

    events: tuple[Event, ...]
    meta: dict[str, Any] = field(default_factory=dict)


def marks(events: Iterable[Event]) -> list[Mark]:
    """The points of Huawei's HCCL iteration trace that these spans imply, ordered by time.

    ``fp_start`` and ``bp_end`` (first forward, last backward of the step), ``allreduceN_start`` and
    ``allreduceN_end`` for every segment, ``iteration_end``. A point whose span is missing is left
    out. Source: the gradient segmentation chapter of the CANN TensorFlow tuning guide.

    Example:
        >>> step = [Event("forward", 0, 2, 1.0, 2.0), Event("backward", 0, 2, 2.0, 4.0)]
        >>> [(mark.name, mark.time) for mark in marks(step)]
        [('fp_start', 1.0), ('bp_end', 4.0)]
    """
    times: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for event in events:
        for name, time in _points(event):
            times[event.rank, event.step, name].append(time)
    found = [
        Mark(name, rank, step, min(at) if name.endswith("_start") else max(at))
        for (rank, step, name), at in times.items()
    ]
    return sorted(found, key=lambda mark: (mark.time, mark.rank, mark.name))


def _points(event: Event) -> list[tuple[str, float]]:
    """Candidates for marks in one span."""
    if event.name == FORWARD:
        return [("fp_start", event.start)]
    if event.name == BACKWARD:
        return [("bp_end", event.end)]
    if event.name == ITERATION:
        return [("iteration_end", event.end)]
    if exchange_order(event.name):
        return [(f"{event.name}_start", event.start), (f"{event.name}_end", event.end)]
    return []
