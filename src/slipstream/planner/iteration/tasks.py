"""The exchanges that follow from a plan: their sizes, phases and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.gradients.layout import Gradient
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.transport_cost import (
    GATHERS,
    ExchangeCurve,
    ExchangeStage,
    gather_stage,
)
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.trace.event import BUFFERS, allreduce


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of an exchange: its seconds alone, and the share of a network that it fills meanwhile.

    Exchanges slow each other down only where together they would fill more than the whole network:
    a small one waits for processes to wake up rather than for bytes. ``network`` None: latency.
    """

    network: str | None
    seconds: float
    demand: float


@dataclass(frozen=True, slots=True)
class CommTask:
    """One exchange: the name of its span, its segment (None: buffers), sizes and phases.

    ``collective`` says what it is, unless it is an all-reduce.
    """

    name: str
    segment: int | None
    num_bytes: int
    gradients: int
    collectives: int
    phases: tuple[Phase, ...]
    collective: str = ""


def comm_tasks(workload: Workload, plan: CommPlan, network: NetworkProfile) -> list[CommTask]:
    """The exchanges from the start of backward on, in order: buffers, then the segments.

    A broadcast of buffers is assumed to cost as much as an all-reduce. Each dtype of a segment is
    an exchange of its own, and so is each sparse gradient: its size is unknown, and it is assumed
    to cost as much as the smallest exchange.
    """
    if network.world_size == 1:
        return []
    tasks = []
    exchange = ExchangeCurve.of(plan.transport, network)
    whole = ExchangeCurve.of_replicated(network) if plan.replicated else exchange
    ratio = plan.codec.ratio if plan.codec else 1.0
    collective = "reduce_scatter" if plan.transport in GATHERS else ""
    if size := workload.buffers_bytes:
        (stage,) = ExchangeCurve.of("flat", network).stages
        phases = _phases(stage, size)
        tasks.append(CommTask(BUFFERS, None, size, 0, 1, phases))
    for number, (start, stop) in enumerate(pairwise((0, *plan.cuts))):
        border = min(max(start, plan.replicated), stop)
        replicated, others = workload.gradients[start:border], workload.gradients[border:stop]
        buckets = [(size, whole, "") for size in _buckets(replicated)]
        buckets += [(size, exchange, collective) for size in _buckets(others)]
        for size, curve, name in buckets:
            shape = (size, stop - start, len(buckets), _stages(curve, size * ratio), name)
            tasks.append(CommTask(allreduce(number + 1), number, *shape))
    return tasks


def gather_tasks(workload: Workload, plan: CommPlan, network: NetworkProfile) -> list[CommTask]:
    """The all-gathers of parameters during the next forward, which uses the last segment first."""
    if network.world_size == 1 or plan.transport not in GATHERS:
        return []
    stage, tasks = gather_stage(plan.transport, network), []
    forward = workload.gradients[::-1]
    for number, (start, stop) in enumerate(pairwise((0, *plan.gather_cuts))):
        size = sum(gradient.num_bytes for gradient in forward[start:stop])
        phases = _phases(stage, size)
        span = allreduce(len(plan.cuts) + 1 + number)
        tasks.append(CommTask(span, number, size, stop - start, 1, phases, "all_gather"))
    return tasks


def _buckets(gradients: Sequence[Gradient]) -> list[int]:
    """Bytes of each collective of a segment: one for each dtype and for each sparse gradient."""
    dense: dict[str, int] = {}
    for gradient in gradients:
        if gradient.num_bytes:
            dense[gradient.dtype] = dense.get(gradient.dtype, 0) + gradient.num_bytes
    return [*dense.values(), *(0 for gradient in gradients if not gradient.num_bytes)]


def _stages(exchange: ExchangeCurve, size: float) -> tuple[Phase, ...]:
    """The phases of an exchange, one stage after the other."""
    return tuple(phase for stage in exchange.stages for phase in _phases(stage, size))


def _phases(stage: ExchangeStage, size: float) -> tuple[Phase, ...]:
    """The latency, which exchanges do not share, and the transfer, which they do; by rounds."""
    size *= stage.share
    total = stage.curve.seconds(max(size, 1.0))
    latency = min(stage.curve.latency, total)
    transfer = total - latency
    demand = stage.per_byte * size / transfer if transfer else 0.0
    rounds = stage.rounds
    once = Phase(None, latency / rounds, 0.0), Phase(stage.kind, transfer / rounds, demand)
    return once * rounds
