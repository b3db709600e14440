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

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.comm import Group
from slipstream.comm.autograd import apply_with_output
from slipstream.comm.collectives import AllReduceOperation, Collective
from slipstream.comm.shards import AllGatherOperation, AllToAllOperation, ReduceScatterOperation
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.parallel.tensor.shard import even_sizes


@dataclass(frozen=True, slots=True)
class _LocalMap:
    """A linear map that sends nothing, or its adjoint, which is a collective.

    Attributes:
        is_local: which of the two this is; local maps get no span in a trace.
    """

    group: Group
    input: TensorSpec
    output: TensorSpec
    local: Callable[[torch.Tensor], torch.Tensor]
    collective: Collective
    is_local: bool = True

    @property
    def adjoint(self) -> _LocalMap:
        swapped = (self.output, self.input, self.local, self.collective, not self.is_local)
        return _LocalMap(self.group, *swapped)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.local(x) if self.is_local else self.collective(x)


def _copy(group: Group, spec: TensorSpec) -> _LocalMap:
    """The identity; adjoint: the sum over ranks."""
    return _LocalMap(group, spec, spec, lambda x: x.view_as(x), AllReduceOperation(group, spec))


def _take_piece(group: Group, whole: TensorSpec, axis: int, sizes: tuple[int, ...]) -> _LocalMap:
    """This rank's piece of a whole tensor; adjoint: the pieces gathered."""
    start, size = sum(sizes[: group.rank]), sizes[group.rank]

    def piece(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(axis, start, size).contiguous()

    gather = AllGatherOperation(group, whole, axis, sizes)
    return _LocalMap(group, whole, whole.resized(size, axis), piece, gather)


def copy_to_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Pass a whole ``x`` to layers that each compute with a part of it or of their weights."""
    return _apply("copy_to_region", _copy(group, TensorSpec.of(x)), x)


def reduce_from_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial ``x``. Exactness: reordered."""
    return _apply("reduce_from_region", _copy(group, TensorSpec.of(x)).adjoint, x)


def scatter_to_region(x: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Take this rank's piece of a whole ``x``; pieces differ by at most one."""
    sizes = even_sizes(x.shape[axis], group.size)
    return _apply("scatter_to_region", _take_piece(group, TensorSpec.of(x), axis, sizes), x)


def gather_from_region(
    x: torch.Tensor, group: Group, axis: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Make the whole tensor from pieces of ``sizes``."""
    whole = TensorSpec.of(x).resized(sum(sizes), axis)
    return _apply("gather_from_region", _take_piece(group, whole, axis, sizes).adjoint, x)


def gather_to_region(
    x: torch.Tensor, group: Group, axis: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Do as `gather_from_region`, for layers that each compute with a part of their weights."""
    whole = TensorSpec.of(x).resized(sum(sizes), axis)
    return _apply("gather_to_region", AllGatherOperation(group, whole, axis, sizes), x)


def reduce_scatter_from_region(x: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Take this rank's piece of the sum of the ranks' partial ``x``. Exactness: reordered."""
    sizes = even_sizes(x.shape[axis], group.size)
    collective = ReduceScatterOperation(group, TensorSpec.of(x), axis, sizes)
    return _apply("reduce_scatter_from_region", collective, x)


def switch_axis(
    x: torch.Tensor, group: Group, *, split: int, joined: int, length: int
) -> torch.Tensor:
    """Turn an ``x`` that is split along axis ``joined``, where the whole is ``length`` long, into
    one that is whole there and split along axis ``split``. Exactness: bitwise.
    """
    sent, received = even_sizes(x.shape[split], group.size), even_sizes(length, group.size)
    equal = len(set(sent)) == len(set(received)) == 1
    collective = AllToAllOperation(group, TensorSpec.of(x), split, joined, sent, received, equal)
    return _apply("switch_axis", collective, x)


def _apply(name: str, collective: Collective, x: torch.Tensor) -> torch.Tensor:
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    return apply_with_output(name, collective, x, needs_grad=needs_grad)
