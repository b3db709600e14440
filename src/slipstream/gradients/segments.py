"""Segments at run time: parameters laid out in buckets, and where the gradient of each one goes.

Never communicates, and never decides which gradients share a segment (``layout`` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.codecs import wire_bytes
from slipstream.gradients.buckets import Bucket, DenseBucket, gradient_dtype, make_buckets
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.messages import sparse_without_momentum
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.strategy import Dgc, Split
from slipstream.trace.recorder import Stamp


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter that gets gradients, and its path in the model.

    [Note: Ranks that share a model] each hold shares of some parameters, and replicas of others,
    which must stay bit for bit alike although each rank averages its own with other ranks. So all
    of them lay out the same segments (``widest`` is like the largest share), and replicas travel in
    buckets of their own: the same sums in the same order, and blocks of a codec with the same
    values.
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
    model: nn.Module, *, trainable: bool, shares: Mapping[str, Sequence[int]] | None = None
) -> list[NamedParameter]:
    """The parameters that require a gradient, or the others, as registered, tied ones once.

    ``shares``: where ranks share the model, the shapes of the largest shares, by name.
    """
    chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad is trainable]
    if shares is None:
        return [NamedParameter(name, p, p) for name, p in chosen]
    shapes = [shares.get(name) for name, _ in chosen]
    return [
        NamedParameter(name, p, p, replica=True)
        if shape is None
        else NamedParameter(name, p, torch.empty(tuple(shape), dtype=p.dtype, device="meta"))
        for (name, p), shape in zip(chosen, shapes, strict=True)
    ]


def as_wide_as_gradients(trainables: Sequence[NamedParameter]) -> list[NamedParameter]:
    """``trainables`` whose gradients travel in their own type, wider than that of parameters."""

    def wide(trainable: NamedParameter) -> torch.Tensor:
        dtype = gradient_dtype(trainable.parameter)
        return torch.empty(trainable.widest.shape, dtype=dtype, device="meta")

    return [replace(trainable, widest=wide(trainable)) for trainable in trainables]


def gradients_of(
    trainables: Sequence[NamedParameter],
    sparse_dims: Sequence[int],
    coding: CompressionPlan | None = None,
) -> list[Gradient]:
    """What the layout knows of their gradients; with ``coding``, bytes are those it leaves."""

    def num_bytes(trainable: NamedParameter) -> int:
        codec = coding.of(trainable.name, trainable.parameter) if coding else None
        return wire_bytes(codec, trainable.widest)

    return [
        Gradient(
            t.name,
            t.layer,
            0 if sparse_dim else num_bytes(t),
            str(t.parameter.dtype).removeprefix("torch."),
        )
        for t, sparse_dim in zip(trainables, sparse_dims, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """What one segment carries: names in ready order, bytes, and how many collectives.

    ``wire_bytes`` are those that stand for ``num_bytes`` of gradients once codecs are at work.
    """

    gradients: tuple[str, ...]
    num_bytes: int
    num_collectives: int
    wire_bytes: int


@dataclass(slots=True)
class Segment:
    """A segment at run time: its buckets, and how many of its gradients are still to come."""

    names: tuple[str, ...]
    buckets: list[Bucket]
    wire_bytes: int
    missing: int = 0
    ready: Stamp = 0.0

    @property
    def summary(self) -> SegmentStats:
        """What it carries."""
        num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        return SegmentStats(self.names, num_bytes, len(self.buckets), self.wire_bytes)


@dataclass(slots=True)
class BucketSlot:
    """Where the gradient of one parameter goes."""

    shipment: Segment
    bucket: Bucket
    slot: int


def lay_out(
    trainables: Sequence[NamedParameter], order: ReadyOrder, split: Split, coding: CompressionPlan
) -> tuple[list[Segment], list[BucketSlot]]:
    """Segments in the order of their exchange, and for each trainable the place of its gradient.

    Sizes that a split asks for are those on the wire.
    """
    ready = [trainables[i] for i in order.order]
    sparse_dims = [order.sparse_dims[i] for i in order.order]
    for trainable, sparse_dim in zip(ready, sparse_dims, strict=True):
        if sparse_dim and isinstance(coding.of(trainable.name, trainable.parameter), Dgc):
            raise sparse_without_momentum(trainable.name)
    gradients = gradients_of(ready, sparse_dims, coding)
    shipments: list[Segment] = []
    places: dict[int, BucketSlot] = {}
    for number, segment in enumerate(plan_segments(gradients, split)):
        part = slice(segment.start, segment.stop)
        inside = ready[part]
        own = coding.for_segment(sum(t.parameter.nbytes for t in inside))
        buckets = _buckets(inside, sparse_dims[part], own, number)
        wire = sum(g.num_bytes for g in gradients_of(inside, sparse_dims[part], own))
        names = tuple(t.name for t in inside)
        shipment = Segment(names, [b for b, _ in buckets], wire)
        shipments.append(shipment)
        for bucket, positions in buckets:
            for slot, position in enumerate(positions):
                places[order.order[segment.start + position]] = BucketSlot(shipment, bucket, slot)
    return shipments, [places[index] for index in range(len(trainables))]


def _buckets(
    trainables: Sequence[NamedParameter],
    sparse_dims: Sequence[int],
    coding: CompressionPlan,
    seed: int,
) -> list[tuple[Bucket, list[int]]]:
    """The buckets of one segment, each with the positions it holds."""

    def dense(positions: Sequence[int]) -> DenseBucket:
        chosen = [trainables[i] for i in positions]
        return coding.bucket([t.name for t in chosen], [t.parameter for t in chosen], seed)

    parameters = [t.parameter for t in trainables]
    kinds = [(coding.of(t.name, t.parameter), t.replica) for t in trainables]
    return make_buckets(parameters, sparse_dims, dense, kinds)
