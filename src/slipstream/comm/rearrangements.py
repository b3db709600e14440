"""Operators that copy, split or join tensors between ranks, without changing values."""

from __future__ import annotations

import torch

from slipstream.comm import arguments
from slipstream.comm.arguments import Device, Sizes
from slipstream.comm.autograd import apply_collective, apply_with_output, graph_break
from slipstream.comm.collectives import BroadcastOperation
from slipstream.comm.groups import Group, member
from slipstream.comm.shards import AllGatherOperation, Gather, ReduceScatterOperation, Scatter
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.comm.traceable import (
    all_gather_in_graph,
    all_to_all_in_graph,
    reduce_scatter_in_graph,
    traceable,
)


@graph_break
def broadcast(
    x: torch.Tensor | None, group: Group | None = None, *, device: Device = None
) -> torch.Tensor:
    """The root's tensor on every rank.

    Backward: the sum of the ranks' gradients, at the root. Exactness: bitwise; backward reordered.

    Args:
        x: at the root any tensor. Elsewhere ignored, and may be None; in a group without ``check``
            a tensor of the root's shape and dtype that requires a gradient if the root's does.
        group: None: all ranks.
        device: where the result goes on a rank that gives no tensor.

    Raises:
        CommError: the root gives no tensor, or this rank is not in the group.
        MismatchError: the ranks call different operators.

    Example:
        >>> broadcast(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "broadcast")
    spec = arguments.root_spec("broadcast", x, group, device)
    x = x if group.rank == 0 else None
    return apply_with_output(
        "broadcast", BroadcastOperation(group, spec), x, needs_grad=spec.requires_grad
    )


@graph_break
def gather(
    x: torch.Tensor, group: Group | None = None, axis: int = 0, *, sizes: Sizes = None
) -> torch.Tensor | None:
    """The ranks' tensors concatenated along ``axis`` at the root; None elsewhere.

    Backward: `scatter`. Exactness: bitwise. Arguments and errors as of `all_gather`.

    Example:
        >>> gather(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "gather")
    x, whole, axis, lengths, needs_grad = arguments.gather_of("gather", x, group, axis, sizes)
    collective = Gather(group, whole, axis, lengths)
    return apply_collective("gather", collective, x, needs_grad=needs_grad)


@traceable(all_gather_in_graph)
def all_gather(
    x: torch.Tensor, group: Group | None = None, axis: int = 0, *, sizes: Sizes = None
) -> torch.Tensor:
    """The ranks' tensors concatenated along ``axis``, on every rank.

    Backward: `reduce_scatter_sum`. Exactness: bitwise; backward reordered.

    Args:
        x: shapes may differ along ``axis`` only; a scalar counts as a vector of one.
        group: None: all ranks.
        axis: may count from the end.
        sizes: the ranks' lengths along ``axis``, for a group without ``check`` (with ``check`` the
            ranks exchange them); None: all are equal.

    Raises:
        CommError: no such axis, or this rank is not in the group.
        MismatchError: shapes, dtypes or operators differ between ranks.

    Example:
        >>> all_gather(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "all_gather")
    x, whole, axis, lengths, needs_grad = arguments.gather_of("all_gather", x, group, axis, sizes)
    collective = AllGatherOperation(group, whole, axis, lengths)
    return apply_with_output("all_gather", collective, x, needs_grad=needs_grad)


@graph_break
def scatter(
    x: torch.Tensor | None,
    group: Group | None = None,
    axis: int = 0,
    *,
    sizes: Sizes = None,
    device: Device = None,
) -> torch.Tensor:
    """Split the root's tensor along ``axis``: piece ``i`` goes to the group's ``i``-th rank.

    Backward: `gather`. Exactness: bitwise.

    Args:
        x: as in `broadcast`.
        group: None: all ranks.
        axis: may count from the end.
        sizes: of the pieces, the same on every rank; None: equal sizes.
        device: where the result goes on a rank that gives no tensor.

    Raises:
        CommError: the sizes do not add up to the length, no such axis, the root gives no tensor, or
            this rank is not in the group.
        MismatchError: the ranks call different operators, or with other axes or sizes.

    Example:
        >>> scatter(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "scatter")
    whole = arguments.root_spec("scatter", x, group, device, axis, *arguments.sizes_digest(sizes))
    axis = arguments.normalized_axis("scatter", axis, whole.shape)
    pieces = arguments.piece_sizes("scatter", whole.shape[axis], axis, group, sizes)
    collective = Scatter(group, whole, axis, pieces)
    x = x if group.rank == 0 else None
    return apply_with_output("scatter", collective, x, needs_grad=whole.requires_grad)


@traceable(reduce_scatter_in_graph)
def reduce_scatter_sum(
    x: torch.Tensor, group: Group | None = None, axis: int = 0, *, sizes: Sizes = None
) -> torch.Tensor:
    """Sum the ranks' tensors and split the sum along ``axis``: piece ``i`` on the ``i``-th rank.

    Backward: `all_gather`. Exactness: reordered; half types are summed in fp32.

    Args:
        x: of equal shape on all ranks.
        group: None: all ranks.
        axis: may count from the end.
        sizes: of the pieces, the same on every rank; None: equal sizes.

    Raises:
        CommError: the sizes do not add up to the length, no such axis, a dtype that has no
            sum, or this rank is not in the group.
        MismatchError: shapes, dtypes, axes, sizes or operators differ between ranks.

    Example:
        >>> reduce_scatter_sum(torch.ones(2))
        tensor([1., 1.])
    """
    name = "reduce_scatter_sum"
    group = member(group, name)
    needs_grad = arguments.check_reducible(name, x, group, axis, *arguments.sizes_digest(sizes))
    axis = arguments.normalized_axis(name, axis, x.shape)
    pieces = arguments.piece_sizes(name, x.shape[axis], axis, group, sizes)
    collective = ReduceScatterOperation(group, TensorSpec.of(x), axis, pieces)
    return apply_with_output(name, collective, x, needs_grad=needs_grad)


@traceable(all_to_all_in_graph)
def all_to_all(
    x: torch.Tensor,
    group: Group | None = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    sizes: Sizes = None,
) -> torch.Tensor:
    """Split along ``split_axis``, send piece ``i`` to the group's ``i``-th rank, and concatenate
    the pieces of all ranks along ``concat_axis``, in the group's order.

    A tensor that is sharded over the ranks along ``concat_axis`` becomes sharded along
    ``split_axis``: from data-parallel to model-parallel and back. Backward: the same with the axes
    swapped. Exactness: bitwise.

    Args:
        x: shapes may differ along ``concat_axis`` only.
        group: None: all ranks.
        split_axis: may count from the end.
        concat_axis: may count from the end.
        sizes: of this rank's pieces; None: equal sizes. If both axes are the same one, each rank
            may pass its own (one more small collective exchanges them); else all pass the same.

    Raises:
        CommError: the sizes do not add up to the length, no such axis, sizes that cannot be joined,
            or this rank is not in the group.
        MismatchError: shapes, dtypes, axes or operators differ between ranks.

    Example:
        >>> all_to_all(torch.ones(2, 3), split_axis=0, concat_axis=1).shape
        torch.Size([2, 3])
    """
    name = "all_to_all"
    group = member(group, name)
    collective, needs_grad = arguments.all_to_all_of(name, x, group, split_axis, concat_axis, sizes)
    return apply_with_output(name, collective, x, needs_grad=needs_grad)
