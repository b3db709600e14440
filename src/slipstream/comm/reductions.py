"""Operators that reduce the ranks' tensors element by element."""

from __future__ import annotations

import torch

from slipstream.comm.arguments import check_reducible
from slipstream.comm.autograd import apply_collective, apply_with_output, graph_break
from slipstream.comm.collectives import AllReduceOperation, Reduce, Reduction
from slipstream.comm.groups import Group, member
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.comm.traceable import all_reduce_in_graph, traceable


@graph_break
def reduce_sum(x: torch.Tensor, group: Group | None = None) -> torch.Tensor | None:
    """The sum of the ranks' tensors at the root; None elsewhere.

    Backward: the root's gradient on every rank; call ``comm.backward()`` where there is no loss.
    Exactness: reordered.

    Raises:
        CommError: a dtype that has no sum, or this rank is not in the group.
        MismatchError: shapes, dtypes or operators differ between ranks.

    Example:
        >>> reduce_sum(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "reduce_sum")
    needs_grad = check_reducible("reduce_sum", x, group)
    collective = Reduce(group, TensorSpec.of(x))
    return apply_collective("reduce_sum", collective, x, needs_grad=needs_grad)


@traceable(all_reduce_in_graph("sum"))
def all_reduce_sum(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The sum of the ranks' tensors on every rank.

    Backward: the sum of the ranks' gradients. Exactness: reordered. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_sum(torch.ones(2))
        tensor([1., 1.])
    """
    return _all_reduce("sum", x, group)


@traceable(all_reduce_in_graph("mean"))
def all_reduce_mean(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The mean of the ranks' tensors on every rank, for floating-point and complex dtypes.

    Backward: the mean of the ranks' gradients. Exactness: reordered. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_mean(torch.ones(2))
        tensor([1., 1.])
    """
    return _all_reduce("mean", x, group)


@graph_break
def all_reduce_max(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The largest value of any rank, element by element, on every rank.

    Backward: the sum of the ranks' gradients where this rank's value is the largest; on a tie every
    rank that holds it gets the full gradient. Exactness: bitwise. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_max(torch.ones(2))
        tensor([1., 1.])
    """
    return _all_reduce("max", x, group)


@graph_break
def all_reduce_min(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The smallest value of any rank; see `all_reduce_max`.

    Example:
        >>> all_reduce_min(torch.ones(2))
        tensor([1., 1.])
    """
    return _all_reduce("min", x, group)


def _all_reduce(reduction: Reduction, x: torch.Tensor, group: Group | None) -> torch.Tensor:
    name = f"all_reduce_{reduction}"
    group = member(group, name)
    needs_grad = check_reducible(name, x, group, reduction=reduction)
    collective = AllReduceOperation(group, TensorSpec.of(x), reduction)
    return apply_with_output(name, collective, x, needs_grad=needs_grad)
