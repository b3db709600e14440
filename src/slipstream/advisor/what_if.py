"""Predictions of other strategies for the run of a trace; the planner makes them.

Where no network was measured, a line through the exchanges of the trace stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression
from typing import Any

from slipstream.advisor.exchanges import Exchanges
from slipstream.errors import TraceError
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.traced import kind_of, traced_transport
from slipstream.planner.iteration.transport_cost import GATHERS, RECIPES
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import Network, NetworkProfile
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.trace.event import Trace
from slipstream.trace.intervals import Interval

SIZES = tuple(2**power for power in range(10, 30))
"""Bytes of the points of a fitted line: 1 KB to 512 MB."""
LEAST_SECONDS = 1e-9
LEAST_SPREAD = 2
"""The largest segment of a trace must be so many times the smallest: between alike ones a line
does not tell what a small exchange costs, and ever smaller segments would look ever better."""


@dataclass(frozen=True)
class WhatIf:
    """Predictions for the run in a trace.

    Attributes:
        forecast: of the trace.
        base: what is predicted of the strategy of the trace.
        best: of the recommended strategy that keeps the mathematics.
    """

    forecast: Forecast
    base: Prediction
    best: Prediction

    @classmethod
    def of(cls, trace: Trace, exchanges: Exchanges, network: NetworkProfile | None) -> WhatIf:
        """Predict from a trace.

        Args:
            trace: of one run, with the size of every gradient.
            exchanges: its typical ones.
            network: as measured; None: a line through ``exchanges``.

        Raises:
            SlipstreamError: the trace does not tell enough, or the network is not that of the
                trace.
        """
        forecast = Forecast.elsewhere(trace, network or fitted_network(trace, exchanges))
        ranked = forecast.exact()
        [replayed] = (one for one in ranked if one.strategy == forecast.base)
        sizes = exchanges.num_bytes
        if network is None and max(sizes) < LEAST_SPREAD * min(sizes):
            most = max(2, replayed.segments)
            ranked = [one for one in ranked if one.segments <= most]
        return cls(forecast, replayed, forecast.recommended(ranked))

    def gain(self, strategy: Strategy) -> float:
        """Seconds that an iteration would be shorter, for as many batches as it takes now."""
        [other] = self.forecast.rank([strategy])
        return self.saved(other)

    def gain_of(self, workload: Workload) -> float:
        """Seconds that an iteration would be shorter with this workload, as it exchanges now."""
        changed = self.forecast.with_workload(workload)
        return self.base.seconds - changed.seconds(self.base.strategy)

    def saved(self, other: Prediction) -> float:
        """`gain` of what is predicted already."""
        passes = self.base.strategy.gradients.accumulate
        return passes * (self.base.per_batch - other.per_batch)

    @property
    def exposed(self) -> float:
        """Seconds of an iteration under the best strategy in which no rank computes."""
        alone = self.forecast.workload.alone(self.best.strategy.gradients.accumulate)
        return max(self.best.seconds - float(alone.max()), 0.0)


def fitted_network(trace: Trace, exchanges: Exchanges) -> NetworkProfile:
    """A network on which one exchange runs at a time, and takes what it took in the trace.

    Raises:
        TraceError: ranks exchanged inside hosts and between them: a trace does not tell these
            apart.
    """
    kind = traced_transport(trace)
    recipe = RECIPES[kind]
    if any(where != "world" for where, _ in recipe.stages):
        raise TraceError(
            f"{kind} mixes exchanges inside hosts and between them, which a trace does not tell "
            "apart; give the file of `slipstream doctor network`"
        )
    line = fitted_line(exchanges.num_bytes, time_shares(exchanges.spans))
    points = [(size, max(line[0] + line[1] * size, LEAST_SECONDS)) for size in SIZES]
    names = [name for _, name in (*recipe.stages, *([GATHERS[kind]] if kind in GATHERS else []))]
    curve = Curve.fit(points)
    hosts: Sequence[str] = trace.meta.get("hosts") or ()
    ranks = int(trace.meta.get("world_size", 1))
    per_host = max((hosts.count(host) for host in hosts), default=1)
    world: dict[str, Any] = {"all_reduce": curve, **dict.fromkeys(names, curve)}
    return NetworkProfile(
        world_size=ranks,
        hosts=len(set(hosts)) or ranks,
        ranks_per_host=per_host if hosts else 1,
        networks={"world": Network(kind="world", ranks=ranks, **world)},
        compute_slowdown=0.0,
        exchange_slowdown=0.0,
        latency_slowdown=0.0,
        queue_share=1.0,
        queue_seconds=points[-1][1],
        codecs=_traced_codec(trace),
        backend="",
        date="",
        versions={},
    )


def _traced_codec(trace: Trace) -> dict[str, CodecCost]:
    """The codec of the trace, by the bytes that it left; what it cost is part of computing."""
    codec, segments = trace.settings("gradients").get("codec"), trace.meta.get("segments") or ()
    whole = sum(one["bytes"] for one in segments)
    wire = sum(one.get("wire_bytes", one["bytes"]) for one in segments)
    if codec is None or not whole or not wire:
        return {}
    return {kind_of(codec): CodecCost(ratio=wire / whole)}


def fitted_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Startup and seconds a byte of the least-squares line, neither of them negative.

    A trace has a handful of sizes, often one; ``planner.network.fit`` needs points of many.

    Example:
        >>> startup, per_byte = fitted_line([10, 20, 40], [3.0, 5.0, 9.0])
        >>> round(startup, 6), round(per_byte, 6)
        (1.0, 0.2)
    """
    startup, per_byte = 0.0, 0.0
    if len(set(sizes)) > 1:
        per_byte, startup = linear_regression(sizes, seconds)
    if startup <= 0 and any(sizes):
        startup, per_byte = 0.0, sum(seconds) / sum(sizes)
    if per_byte < 0 or not any(sizes):
        startup, per_byte = sum(seconds) / len(seconds), 0.0
    return startup, per_byte


def time_shares(spans: Sequence[Interval]) -> list[float]:
    """Seconds of network time of each span; spans that overlap share that time evenly.

    The sum is the time in which any of them ran.

    Example:
        >>> time_shares([(0.0, 4.0), (2.0, 3.0)])
        [3.5, 0.5]
    """
    shares = [0.0] * len(spans)
    for low, high in pairwise(sorted({edge for span in spans for edge in span})):
        running = [i for i, (start, end) in enumerate(spans) if start <= low and high <= end]
        for index in running:
            shares[index] += (high - low) / len(running)
    return shares
