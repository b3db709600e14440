"""Makes a cluster's contention such that replays of measured traces come out as measured.

Never changes what was measured of exchanges alone, unless asked to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import fmean, median
from typing import Any

import numpy as np

from slipstream.planner._channel import Clock
from slipstream.planner._measured import complete_steps, moving
from slipstream.planner._step import Step
from slipstream.planner.cost import Cluster, Curve, Network, Piece
from slipstream.planner.exchange import Plan
from slipstream.planner.workload import Workload
from slipstream.trace.event import Trace

TRUST = 0.03
"""What was measured of contention is given up for a better replay only: a number that takes things
``x`` times as long must save ``(TRUST * log(x))**2`` of squared error. One trace may hardly tell a
number, and would explain by it whatever the model does not."""

_SWEEPS = 10


@dataclass(frozen=True, slots=True)
class Fit:
    """A cluster that explains traces, and how well.

    ``wire`` is the factor on the seconds of every exchange, 1 unless it was asked for. ``error`` is
    the root of the mean squared difference of iterations and ends of exchanges between replays and
    traces, as a share of the iteration, ``error_before`` that of the cluster as it was.
    """

    cluster: Cluster
    wire: float
    error: float
    error_before: float

    def __str__(self) -> str:
        return (
            f"compute slowed by {self.cluster.compute_slowdown:.0%}, exchanges by "
            f"{self.cluster.exchange_slowdown:.0%}, their latency by "
            f"{self.cluster.latency_slowdown:.0%}, exchanges x {self.wire:.2f}; replay within "
            f"{self.error:.1%} of an iteration ({self.error_before:.1%} as measured alone)"
        )


def calibrated(
    workload: Workload, trace: Trace, cluster: Cluster, *, wire: bool = False
) -> Cluster:
    """The cluster whose exchanges are slowed by compute as much as a trace shows.

    What one trace cannot tell stays as it is: how much exchanges slow compute, for the workload was
    freed of just that. See ``fit_contention`` for more traces, and for what was fitted.

    Args:
        workload: that of the trace on this cluster.
        trace: measured; its own plan is replayed.
        cluster: to start from.
        wire: fit a factor on the cost of all exchanges, too.
    """
    replay = _Replay(Plan.of_trace(trace), lambda slowdown: workload, *_observed(trace))
    return _fit([replay], cluster, wire=wire, compute=False).cluster


def fit_contention(traces: Sequence[Trace], cluster: Cluster, *, wire: bool = False) -> Fit:
    """The contention that explains traces of one training under several plans.

    The workload of each trace must predict every other one; that tells how much exchanges slow
    compute, which a single trace cannot. The slowdowns are never negative.

    Raises:
        TraceError, ClusterError: as ``Workload.from_trace``.
    """
    known: dict[tuple[int, float], Workload] = {}

    def workload(source: int, slowdown: float) -> Workload:
        if (source, slowdown) not in known:
            slowed = cluster.model_copy(update={"compute_slowdown": slowdown})
            known[source, slowdown] = Workload.from_trace(traces[source], slowed)
        return known[source, slowdown]

    replays = [
        _Replay(Plan.of_trace(target), partial(workload, source), *_observed(target))
        for target in traces
        for source in range(len(traces))
    ]
    return _fit(replays, cluster, wire=wire, compute=len(traces) > 1)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A plan, the workload (given the slowdown of compute) to replay it with, what was measured."""

    plan: Plan
    workload: Callable[[float], Workload]
    seconds: float
    ends: Mapping[str, float]

    def error(self, cluster: Cluster) -> float:
        """The mean squared difference to what was measured, in iterations."""
        step = Step(self.workload(cluster.compute_slowdown), self.plan, cluster)
        start, seconds = step.settle()
        moments = step.run(start, Clock())
        landed = {p.name: at.end for p, at in zip(step.parcels, moments.landings, strict=True)}
        both = landed.keys() & self.ends.keys()
        squares = [(landed[name] - self.ends[name]) ** 2 for name in both]
        off = (seconds - self.seconds) ** 2 + (fmean(squares) if squares else 0.0)
        return off / self.seconds**2


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


def _fit(replays: Sequence[_Replay], cluster: Cluster, *, wire: bool, compute: bool) -> Fit:
    """Search one number after the other, on ever finer grids around the best so far."""
    grids = {
        "exchange_slowdown": np.linspace(0.0, 3.0, 13),
        "latency_slowdown": np.linspace(0.0, 12.0, 13),
    }
    if compute:
        grids["compute_slowdown"] = np.linspace(0.0, 1.5, 7)
    if wire:
        grids["wire"] = np.linspace(0.6, 1.8, 13)
    found = {name: getattr(cluster, name, 1.0) for name in grids}

    measured = dict(found)

    def error(values: Mapping[str, float]) -> float:
        return fmean(replay.error(_with(cluster, values)) for replay in replays)

    def cost(values: Mapping[str, float]) -> float:
        strain = (
            log(_factor(name, v) / _factor(name, measured[name])) for name, v in values.items()
        )
        return error(values) + TRUST**2 * sum(one**2 for one in strain)

    before, best = error(found), cost(found)
    for fineness in range(_SWEEPS):
        for name, grid in grids.items():
            near = grid if fineness == 0 else found[name] + (grid - grid.mean()) / 2**fineness
            for value in np.unique(np.maximum(near, grid[0])).round(4).tolist():
                tried = found | {name: value}
                if (worth := cost(tried)) < best - 1e-12:
                    found, best = tried, worth
    return Fit(_with(cluster, found), found.get("wire", 1.0), error(found) ** 0.5, before**0.5)


def _factor(name: str, value: float) -> float:
    """How many times as long something takes."""
    return value if name == "wire" else 1.0 + value


def _with(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """The cluster with other slowdowns, and exchanges ``wire`` times as long."""
    changes: dict[str, Any] = dict(values)
    factor = changes.pop("wire", 1.0)
    if factor != 1.0:
        changes["networks"] = {k: _slower(n, factor) for k, n in cluster.networks.items()}
    return cluster.model_copy(update=changes)


def _slower(network: Network, factor: float) -> Network:
    curves = {
        name: Curve(
            points=tuple((size, seconds * factor) for size, seconds in curve.points),
            pieces=tuple(
                Piece(
                    start_bytes=piece.start_bytes,
                    startup=piece.startup * factor,
                    per_byte=piece.per_byte * factor,
                )
                for piece in curve.pieces
            ),
            error_by_decade=curve.error_by_decade,
            trusted=curve.trusted,
        )
        for name, curve in network.curves.items()
    }
    return Network(kind=network.kind, ranks=network.ranks, **curves)
