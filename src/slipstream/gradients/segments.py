"""Segments at run time: parameters laid out in buckets, and where the gradient of each one goes.

Never communicates, and never decides which gradients share a segment: ``layout`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.gradients.buckets import Bucket, SparseBucket, gradient_dtype
from slipstream.gradients.compressed import CompressedBucket, CompressionPlan, NamedCompressor
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.messages import sparse_in_shards, sparse_without_momentum
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.gradients.shards import ALIGNMENT
from slipstream.strategy import DgcConfig, SplitConfig
from slipstream.trace.recorder import Stamp
from slipstream.transport.requests import Request


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter that gets gradients, and its path in the model.

    [Note: Ranks that share a model]
    Each of them holds a shard of some parameters and a replica of others. Replicas must stay
    bitwise equal although each rank averages its own with other ranks. So all of them lay out the
    same segments (``widest`` has the shape of the largest shard), and replicas travel in buckets of
    their own: the same sums in the same order, and codec blocks with the same values.
    """

    name: str
    parameter: nn.Parameter
    widest: torch.Tensor
    replica: bool = False

    @property
    def layer(self) -> str:
        """Path of the module that owns the parameter."""
        return self.name.rpartition(".")[0]


def parameters_of(
    model: nn.Module, *, trainable: bool, shards: Mapping[str, Sequence[int]] | None = None
) -> list[NamedParameter]:
    """The parameters that require a gradient, or the others, as registered, tied ones once.

    ``shards``: where ranks share the model, the shapes of the largest shards, by name.
    """
    chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad is trainable]
    if shards is None:
        return [NamedParameter(name, p, p) for name, p in chosen]
    shapes = [shards.get(name) for name, _ in chosen]
    return [
        NamedParameter(name, p, p, replica=True)
        if shape is None
        else NamedParameter(name, p, torch.empty(tuple(shape), dtype=p.dtype, device="meta"))
        for (name, p), shape in zip(chosen, shapes, strict=True)
    ]


def sparse_tables(model: nn.Module) -> set[torch.Tensor]:
    """The weights of embeddings whose gradients are sparse, and not added to those of a tie."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    every = model.named_parameters(remove_duplicate=False)
    places = Counter[torch.Tensor](p for _, p in every)
    return {t.weight for t in tables if t.sparse and places[t.weight] == 1}


def as_wide_as_gradients(trainables: Sequence[NamedParameter]) -> list[NamedParameter]:
    """``trainables`` whose gradients travel in their own dtype, wider than the parameters'."""

    def wide(trainable: NamedParameter) -> torch.Tensor:
        dtype = gradient_dtype(trainable.parameter)
        return torch.empty(trainable.widest.shape, dtype=dtype, device="meta")

    return [replace(trainable, widest=wide(trainable)) for trainable in trainables]


def gradients_of(
    trainables: Sequence[NamedParameter],
    sparse_dims: Sequence[int],
    compression_plan: CompressionPlan | None = None,
) -> list[Gradient]:
    """The gradients as ``layout`` sees them, with a plan in the bytes that it leaves of them."""

    def num_bytes(trainable: NamedParameter) -> int:
        if compression_plan is None:
            return trainable.widest.nbytes
        return compression_plan.wire_bytes(trainable.name, trainable.parameter, trainable.widest)

    return [
        Gradient(
            t.name,
            t.layer,
            0 if sparse_dim else num_bytes(t),
            str(t.parameter.dtype).removeprefix("torch."),
        )
        for t, sparse_dim in zip(trainables, sparse_dims, strict=True)
    ]


def in_ready_order(
    trainables: Sequence[NamedParameter], order: ReadyOrder
) -> tuple[list[NamedParameter], list[int]]:
    """Parameters and the sparse axes of their gradients, the first to be ready first."""
    return [trainables[i] for i in order.order], [order.sparse_dims[i] for i in order.order]


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """The load of one segment: names in ready order, bytes, and how many collectives.

    ``wire_bytes`` are those that ``num_bytes`` of gradients shrink to where codecs are at work.
    """

    gradients: tuple[str, ...]
    num_bytes: int
    num_collectives: int
    wire_bytes: int


@dataclass(slots=True)
class Segment:
    """A segment at run time: its buckets, and how many of its gradients are still missing."""

    names: tuple[str, ...]
    buckets: list[Bucket]
    wire_bytes: int
    missing: int = 0
    ready: Stamp = 0.0

    @property
    def stats(self) -> SegmentStats:
        """The load of the segment."""
        num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        return SegmentStats(self.names, num_bytes, len(self.buckets), self.wire_bytes)


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """The place of one parameter's gradient."""

    segment: Segment
    bucket: Bucket
    index: int


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """The places of all gradients; the result of ``lay_out``.

    Attributes:
        order: the ready order that the ranks agreed on.
        segments: in the order of their exchange.
        slots: of the trainables, as registered.
        requests: the single requests of one backward, in the order of their start.
        checks_finite: whether a sum must be checked: finite gradients may have an infinite one
            (fp16), or a codec must forget one that is not finite, now or in a later phase.
    """

    order: ReadyOrder
    segments: tuple[Segment, ...]
    slots: tuple[BucketSlot, ...]
    requests: tuple[Request, ...]
    checks_finite: bool

    @property
    def compressors(self) -> Iterator[NamedCompressor]:
        """The compressors of all buckets that a codec compresses."""
        for segment in self.segments:
            for bucket in segment.buckets:
                if isinstance(bucket, CompressedBucket):
                    yield bucket.codec


def lay_out(
    trainables: Sequence[NamedParameter],
    order: ReadyOrder,
    split: SplitConfig,
    plan: CompressionPlan,
) -> GradientLayout:
    """Segments and buckets for ``trainables``; sizes that a split asks for are those on the wire.

    Raises:
        ModelError: a sparse gradient whose momentum DGC applies, or of which ranks take shards.
        StrategyError: the split does not fit this number of gradients.
    """
    ready, sparse_dims = in_ready_order(trainables, order)
    for trainable, sparse_dim in zip(ready, sparse_dims, strict=True):
        if sparse_dim and isinstance(plan.of(trainable.name, trainable.parameter), DgcConfig):
            raise sparse_without_momentum(trainable.name)
        if sparse_dim and plan.cuts(trainable.parameter):
            raise sparse_in_shards(trainable.name)
    if plan.shards is not None:
        # Of the dtypes that gradients or parameters may travel in, flags of use and gaps included.
        cut = [t for t in trainables if plan.cuts(t.parameter)]
        values = sum(plan.shards.length(t.parameter) * t.widest.itemsize for t in cut)
        room = plan.shards.ranks.count * (values + 8 * len(cut)) + ALIGNMENT * len(cut)
        plan.shards.workspace.begin(room)
    segments: list[Segment] = []
    slots: dict[int, BucketSlot] = {}
    for number, part in enumerate(plan_segments(gradients_of(ready, sparse_dims, plan), split)):
        inside, dims = ready[part.start : part.stop], sparse_dims[part.start : part.stop]
        segment_plan = plan.for_segment(sum(t.parameter.nbytes for t in inside))
        buckets = _make_buckets(inside, dims, segment_plan, seed=number)
        num_bytes = sum(g.num_bytes for g in gradients_of(inside, dims, segment_plan))
        segment = Segment(tuple(t.name for t in inside), [b for b, _ in buckets], num_bytes)
        segments.append(segment)
        for bucket, positions in buckets:
            for index, position in enumerate(positions):
                slots[order.order[part.start + position]] = BucketSlot(segment, bucket, index)
    every_bucket = [bucket for segment in segments for bucket in segment.buckets]
    requests = [bucket.exchange(0) for bucket in every_bucket]
    return GradientLayout(
        order,
        tuple(segments),
        tuple(slots[index] for index in range(len(trainables))),
        tuple(request for request in requests if not isinstance(request, Generator)),
        any(b.may_overflow for b in every_bucket)
        or plan.ever_compresses(t.name for t in trainables),
    )


def _make_buckets(
    trainables: Sequence[NamedParameter],
    sparse_dims: Sequence[int],
    plan: CompressionPlan,
    seed: int,
) -> list[tuple[Bucket, list[int]]]:
    """The buckets of one segment in the order of their exchange, each with the positions it holds.

    One flat tensor for each dtype, codec and kind of parameter (shard or replica); then one bucket
    for each sparse gradient, so that dense ones do not wait for its several collectives.
    """
    positions_of: dict[object, list[int]] = {}
    sparse: list[tuple[Bucket, list[int]]] = []
    for position, (t, sparse_dim) in enumerate(zip(trainables, sparse_dims, strict=True)):
        if sparse_dim:
            bucket = SparseBucket(t.parameter, sparse_dim, plan.ranks.count)
            sparse.append((bucket, [position]))
        else:
            cut = plan.cuts(t.parameter)
            key = t.parameter.dtype, plan.of(t.name, t.parameter), t.replica, cut
            positions_of.setdefault(key, []).append(position)

    def dense(positions: Sequence[int]) -> Bucket:
        chosen = [trainables[i] for i in positions]
        return plan.bucket([t.name for t in chosen], [t.parameter for t in chosen], seed)

    return [*((dense(positions), positions) for positions in positions_of.values()), *sparse]
