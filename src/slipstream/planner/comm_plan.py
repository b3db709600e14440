"""What one iteration exchanges and how: a plan, and the communication tasks that follow from it.

When each task runs is the simulator's business (``iteration``); which plan is best, ``ranking``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from slipstream.errors import StrategyError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.cost import CodecCost, NetworkProfile
from slipstream.planner.transport_cost import (
    GATHERS,
    ExchangeCurve,
    ExchangeStage,
    TransportKind,
    gather_stage,
    num_replicated,
    traced_sharding,
    traced_transport,
    transport_kind,
)
from slipstream.planner.workload import Workload, gradients_of, in_half
from slipstream.strategy import HalfWeightsConfig, ShardedConfig, Strategy, TransportConfig
from slipstream.trace.event import BUFFERS, Trace, allreduce


@dataclass(frozen=True, slots=True)
class CommPlan:
    """How one iteration computes and exchanges: what a strategy means for the simulator.

    Attributes:
        cuts: the index after the last gradient of each segment, in ready order.
        overlap: exchange while backward still runs.
        transport: ``flat``, ``direct`` and ``shared_memory``: all-reduces.
            ``hierarchical``: reduce-scatter inside each host, all-reduce of the shards between
            hosts, all-gather inside. ``sharded``: reduce-scatter during backward, each rank updates
            its shard, all-gather of the parameters during the next forward.
        codec: what the codec costs and how much it leaves; None: gradients are sent as they are.
        accumulate: backward passes of one update.
        recompute_share: share of forward that backward computes again.
        half: whether weights have 16 bits.
        gather: of ``sharded``, the index after the last parameter of each all-gather, in forward
            order; None: the segments of ``cuts``, the last one first.
        replicated: of ``sharded``, how many gradients, the first ones in ready order, are exchanged
            whole and updated by every rank; their parameters are not gathered.
    """

    cuts: tuple[int, ...]
    overlap: bool = True
    transport: TransportKind = "flat"
    codec: CodecCost | None = None
    accumulate: int = 1
    recompute_share: float = 0.0
    half: bool = False
    gather: tuple[int, ...] | None = None
    replicated: int = 0

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted({cut for cut in self.cuts if cut > 0}):
            raise StrategyError(
                f"cuts are {self.cuts}; allowed: ascending indices above 0, the last one the "
                "number of gradients"
            )
        if not 0 <= self.replicated <= (self.cuts[-1] if self.transport in GATHERS else 0):
            raise StrategyError(
                f"replicated is {self.replicated}; allowed: 0, with transport sharded up to "
                f"{self.cuts[-1]}, the number of gradients"
            )
        if self.gather is not None and (0, *self.gather)[-1] != self.cuts[-1] - self.replicated:
            raise StrategyError(
                f"gather is {self.gather}; allowed: cuts that end with "
                f"{self.cuts[-1] - self.replicated}, the number of parameters that are gathered"
            )
        if self.accumulate < 1 or not 0.0 <= self.recompute_share <= 1.0:
            raise StrategyError(
                f"accumulate is {self.accumulate}, recompute_share {self.recompute_share}; "
                "allowed: at least 1, and 0 to 1"
            )

    @property
    def gather_cuts(self) -> tuple[int, ...]:
        """The index after the last parameter of each all-gather, in forward order."""
        if self.gather is not None:
            return self.gather
        ends = {max(cut, self.replicated) for cut in (0, *self.cuts)}
        return tuple(self.cuts[-1] - end for end in sorted(ends, reverse=True))[1:]

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        gradients: Sequence[Gradient],
        codecs: Mapping[str, CodecCost] | None = None,
    ) -> CommPlan:
        """The plan of a strategy for these gradients.

        Args:
            strategy: its settings under ``gradients`` count, and ``half_weights``, under which
                fp32 gradients travel in 16 bits where no codec applies.
            gradients: in ready order.
            codecs: the measured cost of each kind of codec.

        Raises:
            StrategyError: its split does not fit the gradients, or its codec was not measured.

        Example:
            >>> CommPlan.of(Strategy(), [Gradient("weight", "", 4096)]).cuts
            (1,)
        """
        config, cost = strategy.gradients, None
        sharding = _sharding(gradients, config.transport)  # in all bytes: of no codec
        if config.codec is not None:
            cost = _codec_cost(config.codec.kind, codecs or {})
            gradients = [replace(g, num_bytes=round(g.num_bytes * cost.ratio)) for g in gradients]
        elif _in_half(strategy) and (whole := sum(g.num_bytes for g in gradients)):
            gradients = [_halved(gradient) for gradient in gradients]
            cost = CodecCost(ratio=sum(g.num_bytes for g in gradients) / whole)
        cuts = tuple(segment.stop for segment in plan_segments(gradients, config.split))
        kind = transport_kind(config.transport)
        half = isinstance(strategy.precision, HalfWeightsConfig)
        return cls(cuts, config.overlap, kind, cost, config.accumulate, half=half, **sharding)

    @classmethod
    def of_trace(cls, trace: Trace, codecs: Mapping[str, CodecCost] | None = None) -> CommPlan:
        """The plan that a trace was recorded under, with the segments that it shows.

        Raises:
            StrategyError: gradients were coded by a codec that was not measured.
        """
        config: dict[str, Any] = (trace.meta.get("strategy") or {}).get("gradients") or {}
        codec, sharded = config.get("codec"), traced_sharding(trace)
        segments = trace.meta.get("segments") or ()
        if segments and all(one.get("wire_bytes") == one["bytes"] for one in segments):
            codec = None  # recorded before it began
        return cls(
            cuts_of(trace),
            config.get("overlap", True),
            traced_transport(trace),
            None if codec is None else _codec_cost(_kind(codec), codecs or {}),
            config.get("accumulate", 1),
            half=in_half(trace),
            **_sharding(gradients_of(trace) if sharded else (), sharded),
        )

    def document(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        """The strategy settings of this plan for these gradients, as plain JSON values."""
        transport: dict[str, Any] = {"kind": self.transport}
        if self.gather:
            transport["gather"] = {"kind": "by_index", "last": [cut - 1 for cut in self.gather]}
        if self.replicated:
            sizes = [gradient.num_bytes for gradient in gradients]
            transport["replicated"] = sum(sizes[: self.replicated]) / sum(sizes)
        return {
            "gradients": {
                "split": {"kind": "by_index", "last": [cut - 1 for cut in self.cuts]},
                "overlap": self.overlap,
                "transport": transport,
                "accumulate": self.accumulate,
            }
        }


def _in_half(strategy: Strategy) -> bool:
    """Whether the gradients of fp32 weights would be in 16 bits."""
    return (
        isinstance(strategy.precision, HalfWeightsConfig) and strategy.precision.exchange == "half"
    )


def _halved(gradient: Gradient) -> Gradient:
    if gradient.dtype != "float32":
        return gradient
    return replace(gradient, num_bytes=gradient.num_bytes // 2)


def _sharding(gradients: Sequence[Gradient], transport: TransportConfig | None) -> dict[str, Any]:
    """What only a plan of ``sharded`` has."""
    if not isinstance(transport, ShardedConfig):
        return {}
    replicated = num_replicated(gradients, transport)
    gathered = gradients[: replicated - 1 : -1] if replicated else gradients[::-1]
    parts = plan_segments(gathered, transport.gather) if gathered else ()
    return {"gather": tuple(part.stop for part in parts), "replicated": replicated}


def cuts_of(trace: Trace) -> tuple[int, ...]:
    """The index after the last gradient of each segment of a trace; one segment if it has none."""
    cuts, stop = [], 0
    for segment in trace.meta.get("segments") or ():
        stop += len(segment["gradients"])
        cuts.append(stop)
    return tuple(cuts) or (len(gradients_of(trace)),)


def _kind(codec: str | Mapping[str, Any]) -> str:
    return codec if isinstance(codec, str) else codec["kind"]


def _codec_cost(kind: str, codecs: Mapping[str, CodecCost]) -> CodecCost:
    if kind not in codecs:
        raise StrategyError(
            f"gradients.codec {kind}: its cost was not measured; measured: "
            f"{', '.join(codecs) or 'none'}; slipstream doctor network measures the codecs that "
            "code all gradients alike, at their default settings"
        )
    return codecs[kind]


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
