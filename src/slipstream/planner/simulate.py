"""What an iteration would be like under a plan, on a cluster: its seconds, or a whole trace.

Never measures anything and never chooses a plan.

[Note: The model]
- A segment is ready when the last of its gradients is; a rank hands its segments over in order.
- An exchange moves once the last rank has handed it over, two at a time at most. First comes its
  latency, then its bytes; where two of them ask for more than the network has, both are slower.
- While one moves, compute goes at ``1 / (1 + compute_slowdown)`` of its speed; while ranks compute,
  latency takes ``1 + latency_slowdown`` times as long and bytes ``1 + exchange_slowdown`` times,
  less if only some of them do. Beside one whose bytes move, the latency of another is at least
  ``queue_share`` of what that one takes, ``queue_seconds`` at most: its messages wait behind the
  other's.
- A rank updates its parameters when everything has landed.
"""

from __future__ import annotations

from typing import Any

from slipstream.planner.channel import Array, Clock
from slipstream.planner.cost import CodecCost, NetworkProfile
from slipstream.planner.emit import events
from slipstream.planner.exchange import Plan
from slipstream.planner.step import Step
from slipstream.planner.workload import Workload
from slipstream.trace.event import Trace

__all__ = ["CodecCost", "Plan", "predict", "simulate"]

SHOWN_RANKS = 64
"""Ranks whose events a simulated trace holds at most."""


def predict(workload: Workload, plan: Plan, cluster: NetworkProfile) -> float:
    """Seconds of an iteration in the long run, on as many ranks as the cluster has.

    Raises:
        StrategyError: the plan is for another number of gradients.
        ClusterError: the transport needs a network that was not measured.
    """
    return Step(workload, plan, cluster).settle()[1]


def simulate(workload: Workload, plan: Plan, cluster: NetworkProfile, steps: int = 1) -> Trace:
    """The trace that a run would leave: of every rank, or of 64 of them if there are more.

    ``meta`` says that it is predicted, of how many ranks (``world_size``), and whose events these
    are (``ranks``). A reduce-scatter or all-gather of the ``sharded`` transport is a span
    ``allreduceN`` whose argument ``collective`` says so; all-gathers count on from the segments.

    Raises:
        StrategyError: the plan is for another number of gradients.
        ClusterError: the transport needs a network that was not measured.
    """
    step, clock = Step(workload, plan, cluster), Clock()
    (start, _), every = step.settle(), []
    for _ in range(steps):
        every.append(step.run(start, clock))
        start = every[-1].end
    ranks = _shown(every[0].passes[-1].ends)
    found = [
        event
        for number, moments in enumerate(every)
        for event in events(step, moments, clock, number, ranks)
    ]
    found.sort(key=lambda event: (event.start, -event.end, event.rank))
    return Trace(tuple(found), _meta(step.workload, plan, cluster, ranks))


def _shown(ends: Array) -> list[int]:
    """All ranks, or the first ones and the one that is last to end its backward."""
    if len(ends) <= SHOWN_RANKS:
        return list(range(len(ends)))
    return sorted({*range(SHOWN_RANKS - 1), max(int(ends.argmax()), SHOWN_RANKS - 1)})


def _meta(
    workload: Workload, plan: Plan, cluster: NetworkProfile, ranks: list[int]
) -> dict[str, Any]:
    count = workload.num_ranks
    hosts = list(workload.hosts) or [f"host{r // cluster.ranks_per_host}" for r in range(count)]
    segments, start = [], 0
    for stop in plan.cuts:
        part = workload.gradients[start:stop]
        names = [gradient.name for gradient in part]
        segments.append({"bytes": sum(g.num_bytes for g in part), "gradients": names})
        start = stop
    return {
        "predicted": True,
        "world_size": count,
        "ranks": ranks,
        "hosts": hosts,
        "model": workload.model,
        "strategy": plan.document(),
        "segments": segments,
        "gradients": [
            {"name": g.name, "layer": g.layer, "bytes": g.num_bytes, "dtype": g.dtype}
            for g in workload.gradients
        ],
        "clock_error": [0.0] * count,
    }
