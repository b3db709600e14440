"""What is exchanged and how: a plan, and the stages through which each of its exchanges goes.

Never knows when anything happens (``simulate`` does), and never chooses a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from slipstream.errors import StrategyError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.cost import CodecCost, Curve, NetworkProfile
from slipstream.planner.workload import Workload, gradients_of
from slipstream.strategy import Strategy
from slipstream.trace.event import BUFFERS, Trace, allreduce

TransportKind = Literal["flat", "hierarchical", "sharded"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one iteration computes and exchanges; what a strategy means for the simulator.

    Attributes:
        cuts: the index after the last gradient of each segment, in ready order.
        overlap: exchange while backward still runs.
        transport: ``flat``: all-reduces. ``hierarchical``: inside each host reduce-scatter, between
            hosts all-reduce of the shards, inside all-gather. ``sharded``: reduce-scatter during
            backward, each rank updates its shard, all-gather of parameters under the next forward.
        codec: what makes gradients smaller on the wire.
        accumulate: backward passes of one update.
        recompute_share: share of forward that backward does again.
    """

    cuts: tuple[int, ...]
    overlap: bool = True
    transport: TransportKind = "flat"
    codec: CodecCost | None = None
    accumulate: int = 1
    recompute_share: float = 0.0

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted({cut for cut in self.cuts if cut > 0}):
            raise StrategyError(
                f"cuts are {self.cuts}; allowed: ascending indices above 0, the last one the "
                "number of gradients"
            )
        if self.accumulate < 1 or not 0.0 <= self.recompute_share <= 1.0:
            raise StrategyError(
                f"accumulate is {self.accumulate}, recompute_share {self.recompute_share}; "
                "allowed: at least 1, and 0 to 1"
            )

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        gradients: Sequence[Gradient],
        codecs: Mapping[str, CodecCost] | None = None,
    ) -> Plan:
        """What a strategy means for these gradients.

        Args:
            strategy: of which the gradients' part counts.
            gradients: in ready order.
            codecs: what each kind of codec costs, where that was measured.

        Raises:
            StrategyError: its split does not fit them, or its codec was not measured.

        Example:
            >>> Plan.of(Strategy(), [Gradient("weight", "", 4096)]).cuts
            (1,)
        """
        config, cost = strategy.gradients, None
        if config.codec is not None:
            cost = _cost(config.codec.kind, codecs or {})
            sent = [round(g.num_bytes * cost.ratio) for g in gradients]
            pairs = zip(gradients, sent, strict=True)
            gradients = [replace(g, num_bytes=num_bytes) for g, num_bytes in pairs]
        cuts = tuple(segment.stop for segment in plan_segments(gradients, config.split))
        return cls(cuts, config.overlap, config.transport.kind, cost, config.accumulate)

    @classmethod
    def of_trace(cls, trace: Trace, codecs: Mapping[str, CodecCost] | None = None) -> Plan:
        """The plan that a trace was recorded under, its segments as they were.

        Raises:
            StrategyError: gradients were coded, and what that costs was not measured.
        """
        config: dict[str, Any] = (trace.meta.get("strategy") or {}).get("gradients") or {}
        codec = config.get("codec")
        return cls(
            cuts_of(trace),
            config.get("overlap", True),
            (config.get("transport") or {}).get("kind", "flat"),
            None if codec is None else _cost(codec["kind"], codecs or {}),
            config.get("accumulate", 1),
        )

    def document(self) -> dict[str, Any]:
        """The settings of the strategy that means this plan, as plain JSON values."""
        return {
            "gradients": {
                "split": {"kind": "by_index", "last": [cut - 1 for cut in self.cuts]},
                "overlap": self.overlap,
                "transport": {"kind": self.transport},
                "accumulate": self.accumulate,
            }
        }


def cuts_of(trace: Trace) -> tuple[int, ...]:
    """The index after the last gradient of each segment of a trace; one segment if it has none."""
    cuts, stop = [], 0
    for segment in trace.meta.get("segments") or ():
        stop += len(segment["gradients"])
        cuts.append(stop)
    return tuple(cuts) or (len(gradients_of(trace)),)


def _cost(kind: str, codecs: Mapping[str, CodecCost]) -> CodecCost:
    if kind not in codecs:
        raise StrategyError(
            f"gradients.codec {kind}: what it costs was not measured; known: "
            f"{', '.join(codecs) or 'none'}; slipstream doctor network measures the codecs that "
            "code all gradients alike, at their default settings"
        )
    return codecs[kind]


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of an exchange: its seconds alone, and the share of a network that it fills meanwhile.

    Exchanges slow one another only where together they would fill more than all of the network:
    a small one waits for processes to wake up rather than for bytes. ``network`` None: latency.
    """

    network: str | None
    seconds: float
    demand: float


@dataclass(frozen=True, slots=True)
class CommTask:
    """What one exchange carries: the name of its span, its segment (None: buffers), its phases."""

    name: str
    segment: int | None
    num_bytes: int
    gradients: int
    collectives: int
    phases: tuple[Phase, ...]


def parcels(workload: Workload, plan: Plan, cluster: NetworkProfile) -> list[CommTask]:
    """What is exchanged from the start of backward on, in order: buffers, then the segments.

    A broadcast of buffers is taken to cost what an all-reduce of them costs. Each dtype of a
    segment is an exchange, and so is each sparse gradient, whose size is not known: it is taken to
    cost what the smallest exchange does.
    """
    if cluster.world_size == 1:
        return []
    world = cluster.network("world")
    found = []
    if workload.buffers_bytes:
        size = workload.buffers_bytes
        found.append(CommTask(BUFFERS, None, size, 0, 1, _phases("world", world.all_reduce, size)))
    for number, (start, stop) in enumerate(pairwise((0, *plan.cuts))):
        buckets = _buckets(workload.gradients[start:stop])
        for size in buckets:
            sent = size * (plan.codec.ratio if plan.codec else 1.0)
            phases = _way(plan.transport, cluster, sent)
            found.append(
                CommTask(allreduce(number + 1), number, size, stop - start, len(buckets), phases)
            )
    return found


def gathers(workload: Workload, plan: Plan, cluster: NetworkProfile) -> list[CommTask]:
    """The all-gathers of parameters under the next forward, which uses the last segment first."""
    if cluster.world_size == 1 or plan.transport != "sharded":
        return []
    curve, found = cluster.network("world").all_gather, []
    for number, (start, stop) in reversed([*enumerate(pairwise((0, *plan.cuts)))]):
        size = sum(gradient.num_bytes for gradient in workload.gradients[start:stop])
        phases = _phases("world", curve, size)
        name = allreduce(2 * len(plan.cuts) - number)
        found.append(CommTask(name, number, size, stop - start, 1, phases))
    return found


def _buckets(gradients: Sequence[Gradient]) -> list[int]:
    """Bytes of each collective of a segment: one for each dtype and for each sparse gradient."""
    dense: dict[str, int] = {}
    for gradient in gradients:
        if gradient.num_bytes:
            dense[gradient.dtype] = dense.get(gradient.dtype, 0) + gradient.num_bytes
    return [*dense.values(), *(0 for gradient in gradients if not gradient.num_bytes)]


def _way(transport: TransportKind, cluster: NetworkProfile, size: float) -> tuple[Phase, ...]:
    """The phases of one exchange of gradients."""
    world = cluster.network("world")
    if transport == "sharded":
        return _phases("world", world.reduce_scatter, size)
    if transport == "flat" or cluster.hosts == 1 or cluster.ranks_per_host == 1:
        return _phases("world", world.all_reduce, size)
    intra, inter = cluster.network("intra"), cluster.network("inter")
    return (
        *_phases("intra", intra.reduce_scatter, size),
        *_phases("inter", inter.all_reduce, size / intra.ranks),
        *_phases("intra", intra.all_gather, size),
    )


def _phases(network: str, curve: Curve, size: float) -> tuple[Phase, ...]:
    """The latency, which exchanges do not share, and the transfer, which they do."""
    total = curve.seconds(max(size, 1.0))
    latency = min(curve.latency, total)
    transfer = total - latency
    demand = curve.per_byte * size / transfer if transfer else 0.0
    return Phase(None, latency, 0.0), Phase(network, transfer, demand)
