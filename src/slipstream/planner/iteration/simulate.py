"""Traces that iterations under a plan on a network would leave; ``model`` times them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from slipstream.planner.iteration.contended_network import IN_FLIGHT, Completion, NetworkClock
from slipstream.planner.iteration.model import IterationModel, SimulatedIteration
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.tasks import CommTask
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.fit import Array
from slipstream.planner.network.profile import NetworkProfile
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, ITERATION, OPTIMIZER, Event, Trace

SHOWN_RANKS = 64
"""Ranks whose events a simulated trace holds at most."""

DECODE = "decode"
"""The span in which a rank turns what a codec sent back into gradients."""


def simulate(workload: Workload, plan: CommPlan, network: NetworkProfile, steps: int = 1) -> Trace:
    """The trace that a run would leave, of all ranks or, of more than 64, of 64.

    ``meta`` says that it is predicted, of how many ranks (``world_size``), and whose events it
    holds (``ranks``). A reduce-scatter or all-gather of the ``sharded`` transport is a span
    ``allreduceN`` whose argument ``collective`` names it; all-gathers are numbered after the
    segments.

    Raises:
        StrategyError: the plan is for another number of gradients.
        ClusterError: the transport needs a network that was not measured.
    """
    model, clock = IterationModel(workload, plan, network), NetworkClock()
    start, read, _ = model.settle()
    iterations: list[SimulatedIteration] = []
    for _ in range(steps):
        iterations.append(model.run(start, clock, read))
        start, read = iterations[-1].end, iterations[-1].read
    ranks = _shown_ranks(iterations[0].passes[-1].ends)
    events = [
        Event(name, rank, step, begin, end, args)
        for step, iteration in enumerate(iterations)
        for rank in ranks
        for name, begin, end, args in _spans(model, iteration, clock, rank)
    ]
    events.sort(key=lambda event: (event.start, -event.end, event.rank))
    return Trace(tuple(events), _meta(model.workload, plan, network, ranks))


def _shown_ranks(ends: Array) -> list[int]:
    """All ranks, or the first ones and the one that is last to end its backward."""
    if len(ends) <= SHOWN_RANKS:
        return list(range(len(ends)))
    return sorted({*range(SHOWN_RANKS - 1), max(int(ends.argmax()), SHOWN_RANKS - 1)})


_Span = tuple[str, float, float, dict[str, Any]]


def _spans(
    model: IterationModel, iteration: SimulatedIteration, clock: NetworkClock, rank: int
) -> Iterator[_Span]:
    """Name, start, end and arguments of each span, as the recorder would have written them."""

    def time(work: Array) -> float:
        return float(clock.times_of(work[rank]))

    samples = float(model.workload.samples[rank]) * model.plan.accumulate
    count = int(samples) if samples.is_integer() else samples
    args: dict[str, Any] = {"samples": count} if samples else {}
    yield ITERATION, time(iteration.start), time(iteration.end), args
    for index, one in enumerate(iteration.passes):
        if one.forward[rank] > one.waits[rank]:
            args = {} if model.workload.reading is None else {"readers": 1}
            yield DATA_WAIT, time(one.waits), time(one.forward), args
        yield FORWARD, time(one.forward), time(one.backward), {}
        begins, args = time(one.backward), {}
        if index == len(iteration.passes) - 1:
            ready = clock.times_of(iteration.ready[rank]) - begins
            args = {"gradients_ready": ready.tolist()}
        yield BACKWARD, begins, time(one.ends), args
    starts = [time(iteration.start)] * len(model.gather_tasks)
    yield from _exchange_spans(model.gather_tasks, iteration.gathers, starts)
    handed_over = clock.times_of(iteration.handed_over[rank]).tolist()
    yield from _exchange_spans(model.tasks, iteration.exchanges, handed_over)
    for seconds, ends in zip(model.decode_seconds, iteration.decoded[rank], strict=True):
        yield DECODE, float(clock.times_of(ends - seconds)), float(clock.times_of(ends)), {}
    yield OPTIMIZER, time(iteration.update), time(iteration.end), {}


def _exchange_spans(
    tasks: list[CommTask], done: Sequence[Completion], handed_over: list[float]
) -> Iterator[_Span]:
    """A span begins when its rank has handed the task over and fewer than two are in flight."""
    free_from = [0.0] * IN_FLIGHT
    for task, completion, ready in zip(tasks, done, handed_over, strict=True):
        slot = free_from.index(min(free_from))
        start = min(max(ready, free_from[slot]), completion.start)
        free_from[slot] = completion.end
        args: dict[str, Any] = {"bytes": task.num_bytes}
        if task.segment is not None:
            args |= {"segment": task.segment, "gradients": task.gradients, "ready": ready}
            args["collectives"] = task.collectives
            args |= {"collective": task.collective} if task.collective else {}
        yield task.name, start, completion.end, args


def _meta(
    workload: Workload, plan: CommPlan, network: NetworkProfile, ranks: list[int]
) -> dict[str, Any]:
    count = workload.num_ranks
    hosts = list(workload.hosts) or [f"host{r // network.ranks_per_host}" for r in range(count)]
    parts = [workload.gradients[start:stop] for start, stop in pairwise((0, *plan.cuts))]
    segments = [
        {"bytes": sum(g.num_bytes for g in part), "gradients": [g.name for g in part]}
        for part in parts
    ]
    return {
        "predicted": True,
        "world_size": count,
        "ranks": ranks,
        "hosts": hosts,
        "model": workload.model,
        "strategy": plan.document(workload.gradients),
        "segments": segments,
        "gradients": [
            {"name": g.name, "layer": g.layer, "bytes": g.num_bytes, "dtype": g.dtype}
            for g in workload.gradients
        ],
        "clock_error": [0.0] * count,
    }
