"""Operators that copy tensors to all ranks, cut them up among ranks, or put them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.comm.apply import apply, eager, everywhere
from slipstream.comm.arguments import (
    Device,
    axis_of,
    digest,
    equal,
    exchanged,
    from_root,
    gathered,
    must_add_up,
    pieces_of,
)
from slipstream.comm.collectives import (
    AllGather,
    AllToAll,
    Broadcast,
    Gather,
    Like,
    ReduceScatter,
    Scatter,
)
from slipstream.comm.groups import Group, member


@eager
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
    whole, wants = from_root("broadcast", x, group, device)
    root = x if group.rank == 0 else None
    return everywhere("broadcast", Broadcast(group, whole), root, wants=wants)


@eager
def gather(
    x: torch.Tensor,
    group: Group | None = None,
    axis: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """The ranks' tensors one behind the other along ``axis`` at the root; None elsewhere.

    Backward: `scatter`. Exactness: bitwise. Arguments and errors as of `all_gather`.

    Example:
        >>> gather(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "gather")
    x, axis, lengths, wants = gathered("gather", x, group, axis, sizes)
    move = Gather(group, Like.of(x).sized(sum(lengths), axis), axis, lengths)
    return apply("gather", move, x, wants=wants)


@eager
def all_gather(
    x: torch.Tensor,
    group: Group | None = None,
    axis: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """The ranks' tensors one behind the other along ``axis``, on every rank.

    Backward: `reduce_scatter_sum`. Exactness: bitwise; backward reordered.

    Args:
        x: equal shapes but along ``axis``; a scalar counts as a vector of one.
        group: None: all ranks.
        axis: may count from the end.
        sizes: of the ranks' tensors along ``axis``. Found out by ``check``; without it None means
            that all are equal.

    Raises:
        CommError: no such axis, or this rank is not in the group.
        MismatchError: shapes, dtypes or operators differ between ranks.

    Example:
        >>> all_gather(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "all_gather")
    x, axis, lengths, wants = gathered("all_gather", x, group, axis, sizes)
    move = AllGather(group, Like.of(x).sized(sum(lengths), axis), axis, lengths)
    return everywhere("all_gather", move, x, wants=wants)


@eager
def scatter(
    x: torch.Tensor | None,
    group: Group | None = None,
    axis: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    device: Device = None,
) -> torch.Tensor:
    """The root's tensor cut along ``axis``: piece ``i`` goes to the group's ``i``-th rank.

    Backward: `gather`. Exactness: bitwise.

    Args:
        x: as of `broadcast`.
        group: None: all ranks.
        axis: may count from the end.
        sizes: of the pieces, the same on every rank; None: equal ones.
        device: where the result goes on a rank that gives no tensor.

    Raises:
        CommError: the pieces do not make up the whole, no such axis, the root gives no tensor, or
            this rank is not in the group.
        MismatchError: the ranks call different operators, or with other axes or sizes.

    Example:
        >>> scatter(torch.ones(2))
        tensor([1., 1.])
    """
    group = member(group, "scatter")
    whole, wants = from_root("scatter", x, group, device, axis, *digest(sizes))
    axis = axis_of("scatter", axis, whole.shape)
    move = Scatter(group, whole, axis, pieces_of("scatter", whole.shape[axis], axis, group, sizes))
    root = x if group.rank == 0 else None
    return everywhere("scatter", move, root, wants=wants)


@eager
def reduce_scatter_sum(
    x: torch.Tensor,
    group: Group | None = None,
    axis: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """The sum of the ranks' tensors, cut along ``axis``: piece ``i`` on the group's ``i``-th rank.

    Backward: `all_gather`. Exactness: reordered; half types are added up in fp32.

    Args:
        x: of equal shape on all ranks.
        group: None: all ranks.
        axis: may count from the end.
        sizes: of the pieces, the same on every rank; None: equal ones.

    Raises:
        CommError: the pieces do not make up the whole, no such axis, a dtype that cannot be added
            up, or this rank is not in the group.
        MismatchError: shapes, dtypes, axes, sizes or operators differ between ranks.

    Example:
        >>> reduce_scatter_sum(torch.ones(2))
        tensor([1., 1.])
    """
    name = "reduce_scatter_sum"
    group = member(group, name)
    wants = equal(name, x, group, axis, *digest(sizes))
    must_add_up(name, x)
    axis = axis_of(name, axis, x.shape)
    move = ReduceScatter(
        group, Like.of(x), axis, pieces_of(name, x.shape[axis], axis, group, sizes)
    )
    return everywhere(name, move, x, wants=wants)


@eager
def all_to_all(
    x: torch.Tensor,
    group: Group | None = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cut along ``split_axis``, piece ``i`` to the group's ``i``-th rank; what comes from all ranks
    is joined along ``concat_axis``, in the group's order.

    It turns a tensor that is split over the ranks along one axis into the same one split along
    another: from data-parallel to model-parallel and back. Backward: the same with the axes
    swapped. Exactness: bitwise.

    Args:
        x: equal shapes, but along ``concat_axis``.
        group: None: all ranks.
        split_axis: may count from the end.
        concat_axis: may count from the end.
        sizes: of this rank's pieces; None: equal ones. Where the two axes are one, each rank may
            have its own (one more small collective finds them out); else they are the same on all.

    Raises:
        CommError: the pieces do not make up the whole, no such axis, sizes that cannot be joined,
            or this rank is not in the group.
        MismatchError: shapes, dtypes, axes or operators differ between ranks.

    Example:
        >>> all_to_all(torch.ones(2, 3), split_axis=0, concat_axis=1).shape
        torch.Size([2, 3])
    """
    name = "all_to_all"
    group = member(group, name)
    cut, join, sent, received, alike, wants = exchanged(
        name, x, group, split_axis, concat_axis, sizes
    )
    move = AllToAll(group, Like.of(x), cut, join, sent, received, alike)
    return everywhere(name, move, x, wants=wants)
