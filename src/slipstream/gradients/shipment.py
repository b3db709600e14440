"""Segments at run time: parameters laid out in buckets, and where the gradient of each one goes.

Never communicates, and never decides which gradients share a segment (``layout`` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from slipstream.gradients.bucket import Bucket, make_buckets
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.order import ReadyOrder
from slipstream.strategy import Split
from slipstream.trace.recorder import Stamp


@dataclass(frozen=True, slots=True)
class Trainable:
    """A parameter that gets gradients, and its path in the model."""

    name: str
    parameter: nn.Parameter

    @property
    def layer(self) -> str:
        """Path of the module that owns the parameter."""
        return self.name.rpartition(".")[0]


def parameters_of(model: nn.Module, *, trainable: bool) -> list[Trainable]:
    """The parameters that require a gradient, or the others, as registered, tied ones once."""
    every = model.named_parameters()
    return [Trainable(name, p) for name, p in every if p.requires_grad is trainable]


def gradients_of(trainables: Sequence[Trainable], sparse_dims: Sequence[int]) -> list[Gradient]:
    """What the layout knows of their gradients."""
    return [
        Gradient(
            t.name,
            t.layer,
            0 if sparse_dim else t.parameter.nbytes,
            str(t.parameter.dtype).removeprefix("torch."),
        )
        for t, sparse_dim in zip(trainables, sparse_dims, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one segment carries: names in ready order, bytes, and how many collectives."""

    gradients: tuple[str, ...]
    num_bytes: int
    num_collectives: int


@dataclass(slots=True)
class Shipment:
    """A segment at run time: its buckets, and how many of its gradients are still to come."""

    names: tuple[str, ...]
    buckets: list[Bucket]
    missing: int = 0
    ready: Stamp = 0.0

    @property
    def summary(self) -> Exchanged:
        """What it carries."""
        num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        return Exchanged(self.names, num_bytes, len(self.buckets))


@dataclass(slots=True)
class Place:
    """Where the gradient of one parameter goes."""

    shipment: Shipment
    bucket: Bucket
    slot: int


def lay_out(
    trainables: Sequence[Trainable], order: ReadyOrder, split: Split
) -> tuple[list[Shipment], list[Place]]:
    """Segments in the order of their exchange, and for each trainable the place of its gradient."""
    ready = [trainables[i] for i in order.order]
    sparse_dims = [order.sparse_dims[i] for i in order.order]
    gradients = gradients_of(ready, sparse_dims)
    shipments: list[Shipment] = []
    places: dict[int, Place] = {}
    for segment in plan_segments(gradients, split):
        part = slice(segment.start, segment.stop)
        buckets = make_buckets([t.parameter for t in ready[part]], sparse_dims[part])
        shipment = Shipment(tuple(t.name for t in ready[part]), [b for b, _ in buckets])
        shipments.append(shipment)
        for bucket, positions in buckets:
            for slot, position in enumerate(positions):
                places[order.order[segment.start + position]] = Place(shipment, bucket, slot)
    return shipments, [places[index] for index in range(len(trainables))]
