"""A plan: how one iteration computes and exchanges, as a strategy means for the simulator.

The exchanges that follow are in ``tasks``; which plan is best is ``search``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import StrategyError
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.planner.iteration.traced import (
    cuts_of,
    gradients_of,
    in_half,
    kind_of,
    traced_sharding,
    traced_transport,
)
from slipstream.planner.iteration.transport_cost import (
    GATHERS,
    TransportKind,
    num_replicated,
    transport_kind,
)
from slipstream.planner.network.costs import CodecCost
from slipstream.strategy import HalfWeightsConfig, ShardedConfig, Strategy, TransportConfig
from slipstream.trace.event import Trace


@dataclass(frozen=True, slots=True)
class CommPlan:
    """The course of one iteration's computing and exchanges, as a strategy means for the simulator.

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
        config = trace.settings("gradients")
        codec, sharded = config.get("codec"), traced_sharding(trace)
        segments = trace.meta.get("segments") or ()
        if segments and all(one.get("wire_bytes") == one["bytes"] for one in segments):
            codec = None  # recorded before it began
        return cls(
            cuts_of(trace),
            config.get("overlap", True),
            traced_transport(trace),
            None if codec is None else _codec_cost(kind_of(codec), codecs or {}),
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
    """Plan what only ``sharded`` has."""
    if not isinstance(transport, ShardedConfig):
        return {}
    replicated = num_replicated(gradients, transport)
    gathered = gradients[: replicated - 1 : -1] if replicated else gradients[::-1]
    parts = plan_segments(gathered, transport.gather) if gathered else ()
    return {"gather": tuple(part.stop for part in parts), "replicated": replicated}


def _codec_cost(kind: str, codecs: Mapping[str, CodecCost]) -> CodecCost:
    if kind not in codecs:
        raise StrategyError(
            f"gradients.codec {kind}: its cost was not measured; measured: "
            f"{', '.join(codecs) or 'none'}; slipstream doctor network measures the codecs that "
            "code all gradients alike, at their default settings"
        )
    return codecs[kind]
