"""Read a trace for planning: its workload, and the network with the contention that explains it.

What was measured of exchanges alone stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from statistics import fmean, median

import numpy as np

from slipstream.planner.iteration.contended_network import NetworkClock
from slipstream.planner.iteration.model import IterationModel, predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.traced import complete_steps, in_flight, workload_of
from slipstream.planner.iteration.transport_cost import GATHERS, RECIPES
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import Contention
from slipstream.planner.network.profile import NetworkProfile
from slipstream.trace.event import Trace

TRUST = 0.03
"""How much better a replay must be before measured contention is given up for it: a change that
makes things take ``x`` times as long must save ``(TRUST * log(x))**2`` of squared error. A trace
may say little about a number, and would otherwise explain by it whatever the model lacks."""

GRIDS = {
    "exchange_slowdown": np.linspace(0.0, 3.0, 13),
    "latency_slowdown": np.linspace(0.0, 12.0, 13),
}
"""The numbers that are fitted, and the values that are tried first."""

HALFWAY = 0.5
"""The part of a fit's move that the contention of the other kind of transport makes, too: whether
the computing of this training or the traced transport differs from the model, one trace does not
tell."""
FARTHEST = log(4.0)
"""The logarithm of the largest factor by which it moves."""

LEAST_FORWARD = 0.25
"""Of backward: a forward that waited all the time says no more. A half is usual."""

_SWEEPS = 10
_HALVINGS = 12


def read_trace(trace: Trace, network: NetworkProfile) -> tuple[Workload, NetworkProfile]:
    """The workload of a trace, and the network with the contention that explains the trace.

    The trace of a single process has no exchanges: every rank is assumed to be like it.

    Raises:
        ClusterError: the network was measured on another number of ranks.
        TraceError: the trace lacks what a prediction needs.
    """
    workload = workload_of(trace, network)
    if workload.num_ranks == 1:
        return workload.for_ranks(network.world_size), network
    workload = without_waits(workload, trace, network)
    return workload, fit_contention(workload, trace, network)


def without_waits(workload: Workload, trace: Trace, network: NetworkProfile) -> Workload:
    """The workload with the longest forward that explains a trace of ``sharded``, in which forward
    waits for parameters; that of any other trace as it is.

    Raises:
        StrategyError, ClusterError: as `predict`.
    """
    plan = CommPlan.of_trace(trace, network.codecs)
    if plan.transport not in GATHERS or workload.reading is not None:
        return workload  # or forward takes its time while batches are waited for
    seconds, _ = _observed(trace)
    shortest = LEAST_FORWARD * workload.backward.mean() / workload.forward.mean()
    least, most = min(float(shortest), 1.0), 1.0  # of the forward that was recorded
    for _ in range(_HALVINGS):
        tried = (least + most) / 2
        shorter = replace(workload, forward=workload.forward * tried)
        if predict(shorter, plan, network) > seconds:
            most = tried
        else:
            least = tried
    return replace(workload, forward=workload.forward * most)


def fit_contention(workload: Workload, trace: Trace, network: NetworkProfile) -> NetworkProfile:
    """The network whose exchanges are slowed down by compute as much as in a trace.

    ``compute_slowdown`` is not fitted: the workload was made by assuming it. The contention of the
    transport that was traced is fitted, be it that of direct sends or that of collectives; the
    other one moves HALFWAY with it, as the same computing is beside both.

    Args:
        workload: that of the trace on this network.
        trace: a measured one; its own plan is replayed.
        network: where the fit starts.
    """
    plan = CommPlan.of_trace(trace, network.codecs)
    seconds, ends = _observed(trace)
    recipe = RECIPES[plan.transport]
    direct = recipe.direct
    measured = {name: float(getattr(network.contention(direct), name)) for name in GRIDS}

    def cost(values: Mapping[str, float]) -> float:
        """Mean squared difference between replay and trace, in iterations, and of the change."""
        model = IterationModel(workload, plan, network.with_contention(direct, values))
        start, read, replayed = model.settle()
        replay = zip(model.tasks, model.run(start, NetworkClock(), read).exchanges, strict=True)
        replayed_ends = {task.name: one.end for task, one in replay}
        if recipe.in_order:  # bytes queue: when early ones end says little about the iteration
            replayed_ends = dict(list(replayed_ends.items())[-1:])
        squares = [(end - ends[name]) ** 2 for name, end in replayed_ends.items() if name in ends]
        error = ((replayed - seconds) ** 2 + (fmean(squares) if squares else 0.0)) / seconds**2
        changes = (log((1 + value) / (1 + measured[name])) for name, value in values.items())
        return error + TRUST**2 * sum(change**2 for change in changes)

    best, least = measured, cost(measured)
    for sweep in range(_SWEEPS):  # one number after the other, on ever finer grids around the best
        for name, grid in GRIDS.items():
            near = grid if sweep == 0 else best[name] + (grid - grid.mean()) / 2**sweep
            for value in np.unique(np.maximum(near, 0.0)).round(4).tolist():
                tried = best | {name: value}
                if (error := cost(tried)) < least - 1e-12:
                    best, least = tried, error
    return _shared(network.with_contention(direct, best), network, direct)


def moved(measured: Contention, fitted: Contention) -> dict[str, float]:
    """The moves of slowdowns by a fit: logarithms of factors, of FARTHEST at most."""
    moves = {n: log((1 + getattr(fitted, n)) / (1 + getattr(measured, n))) for n in GRIDS}
    return {name: min(max(move, -FARTHEST), FARTHEST) for name, move in moves.items()}


def changed(contention: Contention, moves: Mapping[str, float], part: float) -> dict[str, float]:
    """The slowdowns of a contention after a part of these moves."""
    values = {n: (1 + getattr(contention, n)) * exp(part * move) - 1 for n, move in moves.items()}
    return {name: max(value, 0.0) for name, value in values.items()}


def _shared(fitted: NetworkProfile, measured: NetworkProfile, direct: bool) -> NetworkProfile:
    """The fitted network, with the contention of the other kind of transport moved by HALFWAY of
    what the fit has moved the traced one's."""
    if fitted.direct is None:
        return fitted
    moves = moved(measured.contention(direct), fitted.contention(direct))
    other = fitted.contention(not direct)
    return fitted.with_contention(not direct, changed(other, moves, HALFWAY))


def _observed(trace: Trace) -> tuple[float, dict[str, float]]:
    """Seconds of an iteration, and when each exchange ended in it: medians over the steps.

    The seconds are the mean over ranks: those of the slowest rank would also count the delay after
    which it began the iteration.
    """
    seconds, ends = [], defaultdict(list)
    for step in complete_steps(trace):
        begin = min(one.start for one in step)
        seconds.append(fmean(one.duration for one in step))
        names = [event.name for event in step[0].exchanges]
        for name, (_, end) in dict(zip(names, in_flight(step), strict=True)).items():
            ends[name].append(end - begin)
    return median(seconds), {name: median(times) for name, times in ends.items()}
