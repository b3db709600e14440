"""Operators that add up, or compare, the tensors of all ranks, element by element."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.comm.apply import apply, eager, everywhere
from slipstream.comm.arguments import equal, must_add_up
from slipstream.comm.collectives import AllReduce, Extreme, Like, Sum
from slipstream.comm.groups import Group, member


@eager
def reduce_sum(x: torch.Tensor, group: Group | None = None) -> torch.Tensor | None:
    """The sum of the ranks' tensors at the root; None elsewhere.

    Backward: the root's gradient on every rank; call ``comm.backward()`` where there is no loss.
    Exactness: reordered.

    Raises:
        CommError: a dtype that cannot be added up, or this rank is not in the group.
        MismatchError: shapes, dtypes or operators differ between ranks.

    Example:
        >>> reduce_sum(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "reduce_sum")
    wants = equal("reduce_sum", x, group)
    must_add_up("reduce_sum", x)
    return apply("reduce_sum", Sum(group, Like.of(x)), x, wants=wants)


@eager
def all_reduce_sum(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The sum of the ranks' tensors on every rank.

    Backward: the sum of the ranks' gradients. Exactness: reordered. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_sum(torch.ones(2))
        tensor([1., 1.])
    """
    return _sum_all("all_reduce_sum", x, group, mean=False)


@eager
def all_reduce_mean(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The mean of the ranks' tensors on every rank, for floating-point and complex dtypes.

    Backward: the mean of the ranks' gradients. Exactness: reordered. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_mean(torch.ones(2))
        tensor([1., 1.])
    """
    return _sum_all("all_reduce_mean", x, group, mean=True)


@eager
def all_reduce_max(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The largest value of any rank, element by element, on every rank.

    Backward: the sum of the ranks' gradients where this rank's value is the largest; on a tie every
    rank that holds it gets the full gradient. Exactness: bitwise. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_max(torch.ones(2))
        tensor([1., 1.])
    """
    return _extreme("all_reduce_max", x, group, dist.ReduceOp.MAX)


@eager
def all_reduce_min(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The smallest value of any rank; see `all_reduce_max`.

    Example:
        >>> all_reduce_min(torch.ones(2))
        tensor([1., 1.])
    """
    return _extreme("all_reduce_min", x, group, dist.ReduceOp.MIN)


def _sum_all(name: str, x: torch.Tensor, group: Group | None, *, mean: bool) -> torch.Tensor:
    group = member(group, name)
    wants = equal(name, x, group)
    must_add_up(name, x, mean=mean)
    return everywhere(name, AllReduce(group, Like.of(x), mean), x, wants=wants)


def _extreme(
    name: str, x: torch.Tensor, group: Group | None, op: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    group = member(group, name)
    wants = equal(name, x, group)
    must_add_up(name, x, order=True)
    return everywhere(name, Extreme(group, Like.of(x), op), x, wants=wants)
