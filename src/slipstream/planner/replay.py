"""Makes a cluster's contention such that the replay of a measured trace comes out as measured.

Never changes what was measured of exchanges alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import log
from statistics import fmean, median

import numpy as np

from slipstream.planner.channel import Clock
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.exchange import Plan
from slipstream.planner.measured import complete_steps, moving
from slipstream.planner.step import Step
from slipstream.planner.workload import Workload
from slipstream.trace.event import Trace

TRUST = 0.03
"""What was measured of contention is given up for a better replay only: a number that takes things
``x`` times as long must save ``(TRUST * log(x))**2`` of squared error. One trace may hardly tell a
number, and would explain by it whatever the model does not."""

GRIDS = {
    "exchange_slowdown": np.linspace(0.0, 3.0, 13),
    "latency_slowdown": np.linspace(0.0, 12.0, 13),
}
"""What is fitted, and what is tried first."""

_SWEEPS = 10


def calibrated(workload: Workload, trace: Trace, cluster: NetworkProfile) -> NetworkProfile:
    """The cluster whose exchanges are slowed by compute as much as a trace shows.

    What one trace cannot tell stays as it is: how much exchanges slow compute, for the workload was
    freed of just that.

    Args:
        workload: that of the trace on this cluster.
        trace: measured; its own plan is replayed.
        cluster: to start from.
    """
    plan = Plan.of_trace(trace, cluster.codecs)
    seconds, ends = _observed(trace)
    found = {name: float(getattr(cluster, name)) for name in GRIDS}
    measured = dict(found)

    def cost(values: Mapping[str, float]) -> float:
        strain = sum(log((1 + value) / (1 + measured[name])) ** 2 for name, value in values.items())
        tried = cluster.model_copy(update=dict(values))
        return _error(workload, plan, tried, seconds, ends) + TRUST**2 * strain

    best = cost(found)
    for fineness in range(_SWEEPS):  # one number after the other, ever closer to the best so far
        for name, grid in GRIDS.items():
            near = grid if fineness == 0 else found[name] + (grid - grid.mean()) / 2**fineness
            for value in np.unique(np.maximum(near, 0.0)).round(4).tolist():
                tried = found | {name: value}
                if (worth := cost(tried)) < best - 1e-12:
                    found, best = tried, worth
    return cluster.model_copy(update=found)


def _error(
    workload: Workload,
    plan: Plan,
    cluster: NetworkProfile,
    seconds: float,
    ends: Mapping[str, float],
) -> float:
    """The mean squared difference of a replay to what was observed, in iterations."""
    step = Step(workload, plan, cluster)
    start, replayed = step.settle()
    moments = step.run(start, Clock())
    landed = {p.name: at.end for p, at in zip(step.parcels, moments.landings, strict=True)}
    squares = [(landed[name] - ends[name]) ** 2 for name in landed.keys() & ends.keys()]
    return ((replayed - seconds) ** 2 + (fmean(squares) if squares else 0.0)) / seconds**2


def _observed(trace: Trace) -> tuple[float, dict[str, float]]:
    """Seconds of an iteration, and when each exchange ended in it: medians over the steps.

    Of an iteration the mean over ranks: that of the slowest holds its late start of the next one.
    """
    seconds, ends = [], defaultdict(list)
    for step in complete_steps(trace):
        begin = min(one.start for one in step)
        seconds.append(fmean(one.duration for one in step))
        names = [event.name for event in step[0].exchanges]
        for name, (_, end) in dict(zip(names, moving(step), strict=True)).items():
            ends[name].append(end - begin)
    return median(seconds), {name: median(times) for name, times in ends.items()}
