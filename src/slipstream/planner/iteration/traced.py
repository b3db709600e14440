"""Read a trace: the strategy, the gradients, and what is typical of its iterations.

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
from dataclasses import dataclass
from math import nan
from statistics import fmean
from typing import Any, cast

import numpy as np

from slipstream.analysis.breakdown import breakdown
from slipstream.errors import TraceError
from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.transport_cost import (
    RECIPES,
    TransportKind,
    num_replicated,
    sends_early,
    updated_part,
)
from slipstream.planner.iteration.workload import MEDIANS, Workload
from slipstream.planner.network.fit import Array
from slipstream.planner.network.profile import NetworkProfile
from slipstream.strategy import (
    AutoConfig,
    ByIndexConfig,
    FlatConfig,
    OptimalConfig,
    ShardedConfig,
    Strategy,
)
from slipstream.trace.event import (
    BACKWARD,
    BUFFERS,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    Event,
    Trace,
)
from slipstream.trace.intervals import Intervals, union
from slipstream.trace.timeline import Iteration, timeline

Step = Sequence[Iteration]
"""The iterations of all ranks in one step, by rank."""


BEHIND = 0.1
"""Those who read beside the training cannot keep up if it waits for this share of an iteration; a
hundredth, where the trace says that no batch was there. Handing batches over takes time, too."""


def workload_of(trace: Trace, network: NetworkProfile) -> Workload:
    """Take what is typical of the iterations of a trace, without the network's contention.

    Where a trace has no ready times of gradients (one process), they are interpolated by bytes.

    Raises:
        TraceError: the trace does not list the model's gradients, no step is complete on all
            ranks, or ranks disagree about what they exchanged.
        ClusterError: the trace has another number of ranks than the network.
    """
    return MeasuredSteps.of(trace, network).typical()


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The work of each complete step of a trace.

    Attributes:
        trace: where they are from.
        gradients: in ready order.
        stacked: what `measure` finds, with a row a step.
        seconds: of each step, the mean over ranks.
        buffers_bytes: that each step exchanges.
        sharding_seconds: of each gradient under ``sharded``, as the network says.
    """

    trace: Trace
    gradients: tuple[Gradient, ...]
    stacked: Mapping[str, Array]
    seconds: Array
    buffers_bytes: int
    sharding_seconds: float

    @classmethod
    def of(cls, trace: Trace, network: NetworkProfile) -> MeasuredSteps:
        """Measure the steps of a trace; errors as of `workload_of`."""
        if (world_size := int(trace.meta.get("world_size", 1))) > 1:
            network.check_world(world_size)
        gradients = gradients_of(trace)
        steps = complete_steps(trace)
        transport = traced_transport(trace)
        slowdown = network.contention(RECIPES[transport].direct).compute_slowdown
        early = sends_early(transport)
        accumulate = int(trace.settings("gradients").get("accumulate", 1))
        measured = [measure(step, gradients, slowdown, early, accumulate) for step in steps]
        return cls(
            trace,
            gradients,
            {name: np.array([one[name] for one in measured]) for name in measured[0]},
            np.array([fmean(one.duration for one in step) for step in steps]),
            _buffers_bytes(steps[0]),
            network.sharding_seconds,
        )

    def typical(self, chosen: Sequence[int] | Array | None = None) -> Workload:
        """The workload that is typical of these steps, by their numbers; None: of all."""
        trace, gradients = self.trace, self.gradients
        rows = slice(None) if chosen is None else np.asarray(chosen, dtype=int)
        stacked = {name: values[rows] for name, values in self.stacked.items()}
        names = (*MEDIANS, "backward")
        typical: dict[str, Any] = {name: np.median(stacked[name], axis=0) for name in names}
        whole = float(typical["forward"].sum())
        first_part = float(np.median(stacked["first_part"], axis=0).sum()) / whole if whole else 1.0
        passes = np.median(stacked["passes"], axis=0)
        # Ranks begin an iteration by their own optimizer, and by what else they do before and after
        # it, later than the last exchange ended.
        done = np.median(stacked["after"], axis=0)
        exchanges_ended = np.median(stacked["start"] - typical["optimizer"] - done, axis=1)
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
        part, state = self._updated_part, trace.meta.get("optimizer") or {}
        optimizer = np.maximum(typical["optimizer"] - self._of_sharding, 0.0) / part
        return Workload(
            gradients=gradients,
            **typical | {"optimizer": optimizer, "backward": backward},
            ready=np.clip(ready, 0.0, backward[:, None]),
            buffers_bytes=self.buffers_bytes,
            model=str(trace.meta.get("model", "")),
            hosts=hosts if len(hosts) == len(backward) else (),
            optimizer_bytes=round(state.get("bytes", 0) / part),
            shardable=bool(state.get("shardable")),
            sgd=bool(state.get("sgd", True)),
            convolutions=float(trace.meta.get("convolutions", 0.0)),
            half=in_half(trace),
            reading=np.where(is_late, reading, 0.0) if is_late.any() else None,
            first_part=first_part,
            change_bytes=int(trace.meta.get("change_bytes", 0)),
            not_proposed=frozenset(trace.framework.own_settings),
            late=backward - typical["backward"],
        )

    @property
    def _updated_part(self) -> float:
        """The part of the parameters that a rank updated."""
        config = traced_sharding(self.trace)
        if config is None:
            return 1.0
        ranks = int(self.trace.meta.get("world_size", 1))
        return updated_part(self.gradients, num_replicated(self.gradients, config), ranks)

    @property
    def _of_sharding(self) -> float:
        """Seconds of an update that only ``sharded`` takes."""
        is_sharded = traced_sharding(self.trace) is not None
        return self.sharding_seconds * len(self.gradients) if is_sharded else 0.0


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
    return bool(kind_of(trace.settings("precision")) == "half_weights")


def kind_of(setting: Any) -> Any:
    """The kind of a setting, which may be written as its kind alone."""
    return setting.get("kind") if isinstance(setting, Mapping) else setting


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
    step: Step,
    gradients: Sequence[Gradient],
    slowdown: float,
    early: bool = False,
    accumulate: int = 1,
) -> dict[str, Array]:
    """Work of one step by rank; ``marks``: when each gradient was ready and backward ended.

    Args:
        step: all ranks.
        gradients: in ready order.
        slowdown: compute takes ``1 + slowdown`` times as long while an exchange is in flight.
        early: or while about half of the ranks have handed it over.
        accumulate: backward passes of an update, as the strategy says; where a script makes more,
            by `no_sync()` or for several losses, all but the last of a pass count as its forward.
    """
    work = _Work(union(in_flight(step, fmean if early else max)), slowdown)
    rows: dict[str, list[Any]] = defaultdict(list)
    for one in step:
        backwards = [event for event in one.events if event.name == BACKWARD]
        last, passes = backwards[-1], min(len(backwards), accumulate)
        forward, earlier = work.spent(one, FORWARD), backwards[: len(backwards) - passes]
        rows["data_wait"].append(work.spent(one, DATA_WAIT) / passes)
        rows["forward"].append((forward + work.during(earlier)) / passes)
        rows["first_part"].append(forward / len(backwards))
        rows["backward"].append(work.during(backwards[-passes:]) / passes)
        rows["optimizer"].append(work.spent(one, OPTIMIZER))
        rows["other"].append(breakdown(one).parts.other)
        ended = max(last.end, *(exchange.end for exchange in one.exchanges), 0.0)
        after = work.at(one.end) - work.at(ended) - work.spent(one, OPTIMIZER)
        rows["after"].append(min(max(after, 0.0), rows["other"][-1]))
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
        return self.during(event for event in iteration.events if event.name == name)

    def during(self, spans: Iterable[Event]) -> float:
        """The work in these spans."""
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


def cuts_of(trace: Trace) -> tuple[int, ...]:
    """The index after the last gradient of each segment of a trace; one segment if it has none."""
    cuts, stop = [], 0
    for segment in trace.meta.get("segments") or ():
        stop += len(segment["gradients"])
        cuts.append(stop)
    return tuple(cuts) or (len(gradients_of(trace)),)


def traced_transport(trace: Trace) -> TransportKind:
    """The kind of transport that a trace was recorded under.

    Raises:
        TraceError: nobody has said what that takes of a network.
    """
    kind = kind_of(trace.settings("gradients").get("transport") or "flat")
    kind = "flat" if kind == "auto" else kind
    if kind not in RECIPES:
        raise TraceError(
            f"the trace was recorded under transport {kind}, of which nothing is known to predict; "
            f"known: {', '.join(RECIPES)}; record it under one of these"
        )
    return cast(TransportKind, kind)


def traced_sharding(trace: Trace) -> ShardedConfig | None:
    """The settings of ``sharded``, if a trace was recorded under it."""
    if traced_transport(trace) != "sharded":
        return None
    transport = trace.settings("gradients")["transport"]
    config = Strategy.load({"gradients": {"transport": transport}}).gradients.transport
    assert isinstance(config, ShardedConfig)
    return config


def traced_strategy(trace: Trace) -> Strategy:
    """The strategy that a trace was recorded under, without its trace settings.

    ``split: optimal`` is replaced by the split that the trace shows (one segment on one process),
    ``transport: auto`` by ``flat``, with which it begins.

    Raises:
        StrategyError: it has settings that this version does not know.
    """
    document = trace.meta.get("strategy") or {}
    strategy = Strategy.load(
        {name: settings for name, settings in document.items() if name != "trace"}
    )
    if isinstance(strategy.gradients.split, OptimalConfig):
        strategy = strategy.with_gradients(split=ByIndexConfig.of_cuts(cuts_of(trace)))
    if isinstance(strategy.gradients.transport, AutoConfig):
        strategy = strategy.with_gradients(transport=FlatConfig())
    return strategy
