"""Enters and leaves a split region of a model, by linear maps with their adjoints.

A tensor is *whole* (the same on every rank, and so is its gradient), *split* (each rank holds a
piece of the tensor and of its gradient) or *partial* (its value is the sum over ranks)::

    whole   --copy_to_region-------------->  region           backward: gradients are summed
    partial --reduce_from_region---------->  whole            backward: the gradient as it is
    whole   --scatter_to_region----------->  split            backward: gradients are gathered
    split   --gather_from_region---------->  whole            backward: each rank takes its piece
    split   --gather_to_region------------>  region           backward: reduce-scatter
    partial --reduce_scatter_from_region-->  split            backward: gradients are gathered
    split   --switch_axis----------------->  split elsewhere  backward: the same, reversed

The first two are Megatron-LM's f and g. The operators of ``comm`` differentiate the sum of all
ranks' losses; here all ranks hold one and the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from slipstream.comm import Group
from slipstream.comm.autograd import apply_with_output
from slipstream.comm.collectives import AllReduce, Collective
from slipstream.comm.shards import AllGather, AllToAll, ReduceScatter
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.parallel.tensor.shard import even_sizes


@dataclass(frozen=True, slots=True)
class _Copy:
    """The identity; adjoint: the sum over ranks."""

    is_local: ClassVar[bool] = True  # nothing is sent, so no span is recorded
    group: Group
    output: TensorSpec

    @property
    def adjoint(self) -> _Reduce:
        return _Reduce(self.group, self.output)

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        return x.view_as(x)


@dataclass(frozen=True, slots=True)
class _Reduce:
    """The sum over ranks; adjoint: the identity."""

    group: Group
    output: TensorSpec

    @property
    def adjoint(self) -> _Copy:
        return _Copy(self.group, self.output)

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        return AllReduce(self.group, self.output)(x)


@dataclass(frozen=True, slots=True)
class _TakePiece:
    """This rank's piece of a whole tensor; adjoint: the pieces gathered."""

    is_local: ClassVar[bool] = True
    group: Group
    whole: TensorSpec
    axis: int
    sizes: tuple[int, ...]

    @property
    def output(self) -> TensorSpec:
        return self.whole.resized(self.sizes[self.group.rank], self.axis)

    @property
    def adjoint(self) -> _GatherPieces:
        return _GatherPieces(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        start = sum(self.sizes[: self.group.rank])
        return x.narrow(self.axis, start, self.sizes[self.group.rank]).contiguous()


@dataclass(frozen=True, slots=True)
class _GatherPieces:
    """The pieces gathered on every rank; adjoint: this rank's piece."""

    group: Group
    output: TensorSpec
    axis: int
    sizes: tuple[int, ...]

    @property
    def adjoint(self) -> _TakePiece:
        return _TakePiece(self.group, self.output, self.axis, self.sizes)

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        return AllGather(self.group, self.output, self.axis, self.sizes)(x)


def copy_to_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Pass a whole ``x`` to layers that each compute with a part of it or of their weights."""
    return _apply("copy_to_region", _Copy(group, TensorSpec.of(x)), x)


def reduce_from_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial ``x``. Exactness: reordered."""
    return _apply("reduce_from_region", _Reduce(group, TensorSpec.of(x)), x)


def scatter_to_region(x: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Take this rank's piece of a whole ``x``; pieces differ by at most one."""
    sizes = even_sizes(x.shape[axis], group.size)
    return _apply("scatter_to_region", _TakePiece(group, TensorSpec.of(x), axis, sizes), x)


def gather_from_region(
    x: torch.Tensor, group: Group, axis: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Make the whole tensor from pieces of ``sizes``."""
    whole = TensorSpec.of(x).resized(sum(sizes), axis)
    return _apply("gather_from_region", _GatherPieces(group, whole, axis, sizes), x)


def gather_to_region(
    x: torch.Tensor, group: Group, axis: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """As `gather_from_region`, for layers that each compute with a part of their weights."""
    whole = TensorSpec.of(x).resized(sum(sizes), axis)
    return _apply("gather_to_region", AllGather(group, whole, axis, sizes), x)


def reduce_scatter_from_region(x: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Take this rank's piece of the sum of the ranks' partial ``x``. Exactness: reordered."""
    sizes = even_sizes(x.shape[axis], group.size)
    collective = ReduceScatter(group, TensorSpec.of(x), axis, sizes)
    return _apply("reduce_scatter_from_region", collective, x)


def switch_axis(
    x: torch.Tensor, group: Group, *, split: int, joined: int, length: int
) -> torch.Tensor:
    """Turn an ``x`` that is split along axis ``joined``, where the whole is ``length`` long, into
    one that is whole there and split along axis ``split``. Exactness: bitwise.
    """
    sent, received = even_sizes(x.shape[split], group.size), even_sizes(length, group.size)
    equal = len(set(sent)) == len(set(received)) == 1
    collective = AllToAll(group, TensorSpec.of(x), split, joined, sent, received, equal)
    return _apply("switch_axis", collective, x)


def _apply(name: str, collective: Collective, x: torch.Tensor) -> torch.Tensor:
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    return apply_with_output(name, collective, x, needs_grad=needs_grad)
