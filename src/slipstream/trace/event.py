"""The values of a trace: the names of spans, events, marks, and the trace itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ITERATION = "iteration"
"""From the wait for a batch to the end of the update; contains all other spans of the step."""

DATA_WAIT = "data_wait"
"""Waiting for the loader."""

BUFFERS = "buffers"
"""Broadcast of the model's buffers (batch norm statistics). Counts as an exchange."""

FORWARD = "forward"
"""The model and the loss."""

BACKWARD = "backward"
"""The computation of backward, without the wait for exchanges after it."""

OPTIMIZER = "optimizer"
"""The update of the parameters."""

MEETING_WAIT = "meeting_wait"
"""Waiting for the exchange of a meeting (``local``); counts as an exchange that nothing hides."""

STAGE_FORWARD = "stage_forward"
"""The forward of one pipeline stage on one micro-batch; in the last stage with the loss."""

STAGE_BACKWARD = "stage_backward"
"""The backward of one pipeline stage on one micro-batch, or only its part for the inputs."""

STAGE_WEIGHT = "stage_weight"
"""The part of a stage's backward for its parameters, if the schedule runs it separately."""

STAGE_SPANS = (STAGE_FORWARD, STAGE_BACKWARD, STAGE_WEIGHT)

_MARK_OF = {FORWARD: "fp_start", BACKWARD: "bp_end", ITERATION: "iteration_end"}
FULLY_SHARD = "fully_shard"
"""In ``meta["engine"]``: the trace is of torch's FSDP2, not of a session."""

_EXCHANGE = re.compile(r"(?:allreduce|all_gather|reduce_scatter)([1-9][0-9]*)\Z")
_MEETING = re.compile(r"meeting([1-9][0-9]*|_average|_ready)\Z")


def allreduce(number: int) -> str:
    """Name of the exchange of segment ``number``; segment 1 is exchanged first.

    Example:
        >>> allreduce(2)
        'allreduce2'
    """
    return f"allreduce{number}"


def all_gather(number: int) -> str:
    """Name of an all-gather of parameters, exchange ``number`` of its iteration.

    Example:
        >>> all_gather(1)
        'all_gather1'
    """
    return f"all_gather{number}"


def reduce_scatter(number: int) -> str:
    """Name of a reduce-scatter of gradients, exchange ``number`` of its iteration.

    Example:
        >>> reduce_scatter(3)
        'reduce_scatter3'
    """
    return f"reduce_scatter{number}"


def meeting_span(number: int) -> str:
    """Name of the exchange of fragment ``number`` at a meeting, the first one is 1.

    Example:
        >>> meeting_span(2)
        'meeting2'
    """
    return f"meeting{number}"


def is_meeting(name: str) -> bool:
    """Whether a span is what ranks send at a meeting, which may take several iterations.

    Example:
        >>> [is_meeting(name) for name in ("meeting2", "meeting_average", "meeting_wait")]
        [True, True, False]
    """
    return _MEETING.match(name) is not None


def exchange_order(name: str) -> int | None:
    """Position of an exchange in its iteration: 0 for buffers, else its number; None for others.

    Example:
        >>> [exchange_order(n) for n in ("buffers", "allreduce12", "all_gather3", "forward")]
        [0, 12, 3, None]
    """
    if name == BUFFERS:
        return 0
    match = _EXCHANGE.match(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Event:
    """A span of time in one step of one rank.

    Times are seconds on the ``perf_counter`` clock of rank 0. Arguments by span:

    - ``allreduceN``: ``segment`` (from 0), ``bytes``, the numbers of ``gradients`` and
      ``collectives``, and ``ready``, the time at which the last gradient of the segment was ready.
      No other argument is a time.
    - ``all_gatherN`` and ``reduce_scatterN`` of FSDP2: ``module``, ``dtype``, the ``bytes`` of all
      its parameters or gradients, and those ``sent`` by the rank.
    - ``meetingN``, and ``meeting_average`` of what optimizers keep: ``bytes``, and the ``update``
      after which it was sent; with ``trace.norms`` the squared norms of this rank's change,
      ``own_norm2``, and of what came back, ``average_norm2``. These, and ``meeting_ready``, the
      word that a rank waits for slower ones, may last longer than an iteration, and are there in
      pieces, one for each.
    - ``backward`` that ends in exchanges: ``gradients_ready``, for each gradient in ready order the
      seconds from the start of backward until it was ready; None for one without a value.
    - spans of a pipeline stage: ``stage`` and ``micro_batch``, their numbers.
    - ``data_wait``: ``readers``, the workers or threads that read beside the training (0: it reads
      itself), and with ``data.prefetch`` ``queued``, the batches that were there when it asked.
    - ``iteration``: ``samples`` that this rank trained on (its share, if several ranks hold one
      model), if known; the ``loss`` that ``backward()`` got, the mean of an accumulation window;
      with ``trace.norms`` the squared norms of this rank's gradient, ``own_norm2``, and of the
      average, ``average_norm2``.
    - operators of ``slipstream.comm``: ``bytes``, and ``ranks``, the size of the group.

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


class Mark(NamedTuple):
    """A point in time of one step of one rank; ``marks`` lists the names."""

    name: str
    rank: int
    step: int
    time: float


class Framework(NamedTuple):
    """The framework whose loop trains by a session.

    Attributes:
        name: empty: a loop of the script's own.
        own_settings: settings of a strategy that the framework has itself and refuses there, each
            with its own name for it; `OWING_CODEC` among them where it scales losses itself.
    """

    name: str = ""
    own_settings: Mapping[str, str] = {}


OWING_CODEC = "gradients.codec"
"""A codec that owes a part of the gradients to later updates."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of all ranks, ordered by start, and what they were measured on.

    ``meta`` holds plain JSON values; any of these may be missing:

    - ``world_size``, ``hosts`` (by rank), ``model`` (name), ``strategy`` (a mapping)
    - ``segments``: a list of ``{"bytes", "wire_bytes", "gradients": [names]}``; ``wire_bytes`` are
      those that codecs left of them when the trace ended
    - ``gradients``: in ready order, a list of ``{"name", "layer", "bytes", "dtype"}``; a sparse
      gradient has 0 bytes
    - ``change_bytes``: those of a change of all parameters with gradients, in fp32 or wider
    - ``optimizer``: ``{"bytes", "shardable", "sgd"}``: those of its state on rank 0, whether ranks
      may each update a share, and whether it is plain SGD, whose momentum DGC can take over
    - ``framework``: ``{"name", "own_settings"}``, see `Framework`
    - ``engine``: ``fully_shard`` where torch's FSDP2 trains; then there are neither segments nor
      gradients, and ``modules`` has the paths of those that it gathers
    - ``versions`` of torch and slipstream
    - ``cpu_seconds``: by rank, those of the thread that trains in an iteration, the median; where
      no rank has a GPU
    - ``clock_error``: by rank, the most by which its times can be off, in seconds
    - ``predicted``: true if the trace was simulated; it may then hold few of its ranks
    """

    events: tuple[Event, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def framework(self) -> Framework:
        """The framework whose loop trains.

        Example:
            >>> Trace((), {"framework": {"name": "Fabric", "own_settings": {}}}).framework.name
            'Fabric'
        """
        found = self.meta.get("framework") or {}
        return Framework(found.get("name", ""), found.get("own_settings", {}))

    def settings(self, group: str) -> Any:
        """The strategy's settings of a group, as plain values; empty where it has none.

        Example:
            >>> Trace((), {"strategy": {"gradients": {"accumulate": 4}}}).settings("gradients")
            {'accumulate': 4}
        """
        return (self.meta.get("strategy") or {}).get(group) or {}


def marks(events: Iterable[Event]) -> list[Mark]:
    """The marks of an HCCL iteration trace that follow from these spans, ordered by time.

    ``fp_start`` (start of the first forward of the step), ``bp_end`` (end of the last backward),
    ``allreduceN_start`` and ``allreduceN_end`` of each segment, ``iteration_end``. A mark whose
    span is missing is omitted.
    Source: Huawei, CANN TensorFlow tuning guide, gradient segmentation.

    Example:
        >>> step = [Event("forward", 0, 2, 1.0, 2.0), Event("backward", 0, 2, 2.0, 4.0)]
        >>> [(mark.name, mark.time) for mark in marks(step)]
        [('fp_start', 1.0), ('bp_end', 4.0)]
    """
    times: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for event in events:
        names = [_MARK_OF[event.name]] if event.name in _MARK_OF else []
        if exchange_order(event.name):
            names = [f"{event.name}_start", f"{event.name}_end"]
        for name in names:
            time = event.start if name.endswith("_start") else event.end
            times[event.rank, event.step, name].append(time)
    points = [
        Mark(name, rank, step, min(at) if name.endswith("_start") else max(at))
        for (rank, step, name), at in times.items()
    ]
    return sorted(points, key=lambda mark: (mark.time, mark.rank, mark.name))
