"""What one iteration computes and exchanges, read from a trace and freed of its strategy.

A workload holds compute times, ready times and bytes, and nothing about exchanges.

[Note: Contention]
While an exchange is in flight, compute runs at ``1 / (1 + compute_slowdown)`` of its speed. So
there are two clocks: seconds, and *work*, the seconds that compute would have taken without
exchanges. Work advances at the same rate on all ranks, since all take part in an exchange. A
workload is in work; the simulator turns it into seconds again.

[Note: Typical ranks]
Which rank is late changes from iteration to iteration, and exchanges wait for the last one. The
median of each rank alone would lose that some rank is always late. So the ready times of each
gradient are sorted over ranks in each iteration; the median over iterations is taken of the
earliest, the second ... the last; and these go to the ranks in the order in which they end
backward. Predictions need no more: an exchange waits for the last rank, whichever it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from typing import Any

import numpy as np

from slipstream.analysis.breakdown import breakdown
from slipstream.errors import TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.cost import HalfSpeed, NetworkProfile
from slipstream.planner.fit import Array
from slipstream.planner.transport_cost import (
    RECIPES,
    num_replicated,
    sends_early,
    traced_sharding,
    traced_transport,
    updated_part,
)
from slipstream.trace.event import BACKWARD, BUFFERS, DATA_WAIT, FORWARD, OPTIMIZER, Event, Trace
from slipstream.trace.intervals import Intervals, union
from slipstream.trace.timeline import Iteration, timeline

Step = Sequence[Iteration]
"""The iterations of all ranks in one step, by rank."""


_MEDIANS = ("data_wait", "forward", "optimizer", "other", "samples")
"""What has an entry a rank and is measured as it is."""

_GROW = ("data_wait", "forward", "backward", "reading")
"""What takes as many times as long for as many times the batch."""

BEHIND = 0.1
"""Those who read beside the training cannot keep up if it waits for this share of an iteration; a
hundredth, where the trace says that no batch was there. Handing batches over takes time, too."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One iteration without accumulation: seconds of work by rank, bytes by gradient.

    ``data_wait``, ``forward``, ``backward``, ``optimizer`` and ``other`` (what the script does
    besides) have an entry a rank; ``ready`` has a row a rank and a column a gradient, in ready
    order, counted from the start of backward. ``samples`` are those of one batch of each rank, 0
    where unknown. ``hosts`` and ``model`` are the names in the trace. ``optimizer_bytes`` is the
    optimizer's whole state, 0 where unknown; ``shardable`` says whether ranks may each update a
    share of the parameters, ``sgd`` whether DGC may take the optimizer's momentum over.
    ``convolutions`` is the part of the layers that are such, ``half`` says whether weights have 16
    bits. ``reading`` are the seconds from batch to batch of workers or threads that read beside the
    training and cannot keep up, 0 of those that can; None: of all ranks.
    """

    gradients: tuple[Gradient, ...]
    data_wait: Array
    forward: Array
    backward: Array
    ready: Array
    optimizer: Array
    other: Array
    samples: Array
    buffers_bytes: int = 0
    model: str = ""
    hosts: tuple[str, ...] = ()
    optimizer_bytes: int = 0
    shardable: bool = False
    sgd: bool = True
    convolutions: float = 0.0
    half: bool = False
    reading: Array | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that the arrays describe."""
        return len(self.forward)

    @property
    def borders(self) -> tuple[int, ...]:
        """Where in ready order another dtype begins: no collective reaches across."""
        types = [gradient.dtype for gradient in self.gradients]
        return tuple(i for i in range(1, len(types)) if types[i] != types[i - 1])

    @property
    def forward_times(self) -> Array:
        """Seconds of forward until each parameter's successor is needed, in forward order, by rank.

        A layer is assumed to take the same share of forward as of backward.
        """
        ready = np.maximum.accumulate(self.ready, axis=1)
        gaps = np.diff(ready, axis=1, prepend=0.0)[:, ::-1] + 1e-12
        return np.asarray(self.forward[:, None] * gaps / gaps.sum(axis=1, keepdims=True))

    def alone(self, batches: int) -> Array:
        """Seconds of an iteration of each rank, of so many batches, without any exchange.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.alone(batches=2)
            array([8., 8.])
        """
        batch = self.data_wait + self.forward + self.backward
        seconds = batches * batch + self.optimizer + self.other
        return seconds if self.reading is None else np.maximum(seconds, batches * self.reading)

    def for_ranks(self, count: int) -> Workload:
        """The same work on another number of ranks: the ranks' profiles, repeated in order.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.for_ranks(5).num_ranks
            5
        """
        if count == self.num_ranks:
            return self
        rows = np.arange(count) % self.num_ranks
        names = (*_MEDIANS, "backward", "ready")
        profiles: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        profiles["reading"] = None if self.reading is None else self.reading[rows]
        hosts = tuple(self.hosts[row] for row in rows) if self.hosts else ()
        return replace(self, **profiles, hosts=hosts)

    def computed(self, half: bool, speed: HalfSpeed | None) -> Workload:
        """The same with weights of 16 bits or of 32; what ``speed`` does not tell stays.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one)
            >>> pair.computed(half=True, speed=HalfSpeed(dense=4.0, convolutional=2.0)).forward
            array([0.25, 0.25])
        """
        if half == self.half or speed is None:
            return self
        factor = 1 / speed.of(self.convolutions) if half else speed.of(self.convolutions)
        scaled = {name: getattr(self, name) * factor for name in ("forward", "backward", "ready")}
        return replace(self, **scaled, half=half)

    def with_batch(self, samples: float) -> Workload:
        """The same model on batches of so many samples a rank.

        Loading, forward and backward are taken to grow with the batch; the optimizer and the bytes
        stay.

        Raises:
            TraceError: how many samples the workload has is not known.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, samples=4 * one)
            >>> pair.with_batch(8).forward
            array([2., 2.])
        """
        if not self.samples.all():
            raise TraceError(
                "the trace does not say how many samples a batch has; record it again with a "
                "loader: accelerate(model, optimizer, loader)"
            )
        times = samples / self.samples
        names = [name for name in (*_GROW, "samples") if getattr(self, name) is not None]
        grown = {name: getattr(self, name) * times for name in names}
        return replace(self, **grown, ready=self.ready * times[:, None])

    def fed(self, times: float | None = None) -> Workload:
        """The same with ``times`` as many readers; None: every batch is there in time.

        Example:
            >>> one = np.ones(2)
            >>> pair = Workload((), one, one, one, np.ones((2, 0)), one, one, one, reading=8 * one)
            >>> pair.fed(2).reading, pair.fed().reading
            (array([4., 4.]), None)
        """
        if times is None:
            return replace(self, data_wait=np.zeros_like(self.data_wait), reading=None)
        return replace(self, reading=None if self.reading is None else self.reading / times)

    def evened(self) -> Workload:
        """The same where all ranks compute for equally long: as long as they do on average.

        Example:
            >>> one, two = np.ones(2), np.array([2.0, 4.0])
            >>> Workload((), one, one, two, np.ones((2, 0)), one, one, one).evened().backward
            array([3., 3.])
        """
        names = ("forward", "backward", "ready")
        means = {name: getattr(self, name).mean(axis=0, keepdims=True) for name in names}
        return replace(self, **{n: m.repeat(self.num_ranks, axis=0) for n, m in means.items()})

    @classmethod
    def from_trace(cls, trace: Trace, network: NetworkProfile) -> Workload:
        """What is typical of the iterations of a trace, with the network's contention taken out.

        Where a trace has no ready times of gradients (one process), they are interpolated by bytes.

        Raises:
            TraceError: the trace does not list the model's gradients, no step is complete on all
                ranks, or ranks disagree about what they exchanged.
            ClusterError: the trace has another number of ranks than the network.
        """
        if (world_size := int(trace.meta.get("world_size", 1))) > 1:
            network.check_world(world_size)
        gradients = gradients_of(trace)
        steps = complete_steps(trace)
        transport = traced_transport(trace)
        slowdown = network.contention(RECIPES[transport].direct).compute_slowdown
        early = sends_early(transport)
        measured = [measure(step, gradients, slowdown, early) for step in steps]
        stacked = {name: np.array([one[name] for one in measured]) for name in measured[0]}
        typical = {name: np.median(stacked[name], axis=0) for name in _MEDIANS}
        passes = np.median(stacked["passes"], axis=0)
        # Ranks begin an iteration by their own optimizer later than the last exchange ended.
        exchanges_ended = np.median(stacked["start"] - typical["optimizer"], axis=1)
        since = _typical_ranks(stacked["marks"] - exchanges_ended[:, None, None])
        spent = since[:, -1] - typical["optimizer"] - typical["other"]
        before = typical["data_wait"] + typical["forward"]
        backward = np.maximum(spent / passes - before, 0.0)
        ready = since[:, :-1] - (since[:, -1] - backward)[:, None]
        reading = np.median(stacked["period"], axis=0) / passes
        queued = np.median(stacked["queued"], axis=0)  # nan: not known
        bound = np.where(queued == 0, BEHIND / 10, BEHIND)
        is_late = typical["data_wait"] > bound * reading
        is_late &= (np.median(stacked["readers"], axis=0) > 0) & ~(queued > 0)
        typical["data_wait"] = np.where(is_late, 0.0, typical["data_wait"])
        hosts = tuple(str(host) for host in trace.meta.get("hosts") or ())
        part, optimizer = _updated_part(trace, gradients), trace.meta.get("optimizer") or {}
        return cls(
            gradients=gradients,
            **typical | {"optimizer": typical["optimizer"] / part},
            backward=backward,
            ready=np.clip(ready, 0.0, backward[:, None]),
            buffers_bytes=_buffers_bytes(steps[0]),
            model=str(trace.meta.get("model", "")),
            hosts=hosts if len(hosts) == len(backward) else (),
            optimizer_bytes=round(optimizer.get("bytes", 0) / part),
            shardable=bool(optimizer.get("shardable")),
            sgd=bool(optimizer.get("sgd", True)),
            convolutions=float(trace.meta.get("convolutions", 0.0)),
            half=in_half(trace),
            reading=np.where(is_late, reading, 0.0) if is_late.any() else None,
        )


def gradients_of(trace: Trace) -> tuple[Gradient, ...]:
    """The gradients that a trace lists, in ready order.

    Raises:
        TraceError: it lists none.
    """
    listed = trace.meta.get("gradients")
    if not listed:
        raise TraceError(
            "the trace does not list the model's gradients (meta.gradients), so nothing can be "
            "planned from it; record it again with this version of slipstream"
        )
    try:
        return tuple(
            Gradient(g["name"], g["layer"], int(g["bytes"]), g["dtype"], g.get("registered", -1))
            for g in listed
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"the trace is damaged: its list of gradients cannot be read ({error!r:.80}); each one "
            "has name, layer, bytes and dtype: record the trace again"
        ) from error


def in_half(trace: Trace) -> bool:
    """Whether weights had 16 bits."""
    precision = (trace.meta.get("strategy") or {}).get("precision")
    kind = precision.get("kind") if isinstance(precision, Mapping) else precision
    return kind == "half_weights"


def _updated_part(trace: Trace, gradients: Sequence[Gradient]) -> float:
    """The part of the parameters that a traced rank updated."""
    config = traced_sharding(trace)
    if config is None:
        return 1.0
    ranks = int(trace.meta.get("world_size", 1))
    return updated_part(gradients, num_replicated(gradients, config), ranks)


def _typical_ranks(times: Array) -> Array:
    """Steps x ranks x points to ranks x points; see the note at the top of the file."""
    in_order = np.median(np.sort(times, axis=1), axis=0)
    ends = np.median(times[:, :, -1], axis=0)
    return np.asarray(in_order[np.argsort(np.argsort(ends, kind="stable"))])


def _buffers_bytes(step: Step) -> int:
    return sum(e.args.get("bytes", 0) for e in step[0].exchanges if e.name == BUFFERS)


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


def in_flight(
    step: Step, start: Callable[[Iterable[float]], float] = max
) -> list[tuple[float, float]]:
    """Start and end of each exchange of a step; it starts when the last rank has handed it over,
    or at ``start`` of the times at which ranks have."""
    by_exchange = zip(*(one.exchanges for one in step), strict=True)
    return [(start(e.start for e in same), max(e.end for e in same)) for same in by_exchange]


def measure(
    step: Step, gradients: Sequence[Gradient], slowdown: float, early: bool = False
) -> dict[str, Array]:
    """Work of one step by rank; ``marks``: when each gradient was ready and backward ended.

    Args:
        step: all ranks.
        gradients: in ready order.
        slowdown: compute takes ``1 + slowdown`` times as long while an exchange is in flight.
        early: or while about half of the ranks have handed it over.
    """
    work = _Work(union(in_flight(step, fmean if early else max)), slowdown)
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
        rows["period"].append(work.at(one.end) - work.at(one.start))
        waits = [event for event in one.events if event.name == DATA_WAIT]
        rows["readers"].append(min((e.args.get("readers", 0) for e in waits), default=0))
        rows["queued"].append(min((e.args.get("queued", nan) for e in waits), default=nan))
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
