"""Twelve operators, and a mean, that move tensors between ranks anywhere in a forward graph.

Each is a linear map of ``moves`` whose backward is the adjoint map, run by the same function, so
that gradients of any order are right: what is differentiated is the sum of all ranks' losses. The
largest and the smallest value pass the gradient on to every rank that holds them.

Semantics and names: MegEngine's ``functional.distributed``. Under ``torch.compile`` each call is a
break of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from slipstream.comm.agreement import together
from slipstream.comm.apply import apply
from slipstream.comm.arguments import (
    axis_of,
    digest,
    equal,
    gathered,
    headers,
    must_add_up,
    peer_group,
    pieces_of,
    present,
    same_but,
    template,
    wanted,
)
from slipstream.comm.groups import Group, member
from slipstream.comm.header import Header, check_tensor, consult_sizes, receive_header, send_header
from slipstream.comm.moves import (
    AllToAll,
    Broadcast,
    Gather,
    GatherAll,
    Known,
    Like,
    Receive,
    Scatter,
    Send,
    Sum,
    SumAll,
    SumScatter,
    extremum,
)
from slipstream.errors import CommError

Device = torch.device | str | None

P = ParamSpec("P")
R = TypeVar("R")


def _eager(operator: Callable[P, R]) -> Callable[P, R]:
    """Under ``torch.compile`` the graph breaks here; its machinery is loaded only then."""

    @wraps(operator)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            aside: Callable[P, R] = torch.compiler.disable(operator)
            return aside(*args, **kwargs)
        return operator(*args, **kwargs)

    return call


@_eager
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
    root = headers("broadcast", x, group)[0]
    move = Broadcast(group, template(root, x, group, device))
    return _result(apply("broadcast", move, x if group.rank == 0 else None, wants=root.wants))


@_eager
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
    every = equal("reduce_sum", x, group)
    must_add_up("reduce_sum", x)
    return apply("reduce_sum", Sum(group, Like.of(x)), x, wants=wanted(every))


@_eager
def all_reduce_sum(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The sum of the ranks' tensors on every rank.

    Backward: the sum of the ranks' gradients. Exactness: reordered. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_sum(torch.ones(2))
        tensor([1., 1.])
    """
    return _sum_all("all_reduce_sum", x, group, mean=False)


@_eager
def all_reduce_mean(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The mean of the ranks' tensors on every rank, for floating-point and complex dtypes.

    Backward: the mean of the ranks' gradients. Exactness: reordered. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_mean(torch.ones(2))
        tensor([1., 1.])
    """
    return _sum_all("all_reduce_mean", x, group, mean=True)


@_eager
def all_reduce_max(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The largest value of any rank, element by element, on every rank.

    Backward: the sum of the ranks' gradients where this rank's value is the largest; on a tie every
    rank that holds it gets the full gradient. Exactness: bitwise. Raises as `reduce_sum`.

    Example:
        >>> all_reduce_max(torch.ones(2))
        tensor([1., 1.])
    """
    return _extreme("all_reduce_max", x, group, dist.ReduceOp.MAX)


@_eager
def all_reduce_min(x: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The smallest value of any rank; see `all_reduce_max`.

    Example:
        >>> all_reduce_min(torch.ones(2))
        tensor([1., 1.])
    """
    return _extreme("all_reduce_min", x, group, dist.ReduceOp.MIN)


@_eager
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
    group, x, axis, pieces = gathered("gather", x, group, axis, sizes)
    move = Gather(group, Like.of(x).sized(sum(pieces.sizes), axis), axis, pieces.sizes)
    return apply("gather", move, x, wants=pieces.wants)


@_eager
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
    group, x, axis, pieces = gathered("all_gather", x, group, axis, sizes)
    move = GatherAll(group, Like.of(x).sized(sum(pieces.sizes), axis), axis, pieces.sizes)
    return _result(apply("all_gather", move, x, wants=pieces.wants))


@_eager
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
    root = headers("scatter", x, group, axis, *digest(sizes))[0]
    whole = template(root, x, group, device)
    axis = axis_of("scatter", axis, whole.shape)
    move = Scatter(group, whole, axis, pieces_of("scatter", whole.shape[axis], axis, group, sizes))
    return _result(apply("scatter", move, x if group.rank == 0 else None, wants=root.wants))


@_eager
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
    every = equal(name, x, group, axis, *digest(sizes))
    must_add_up(name, x)
    axis = axis_of(name, axis, x.shape)
    move = SumScatter(group, Like.of(x), axis, pieces_of(name, x.shape[axis], axis, group, sizes))
    return _result(apply(name, move, x, wants=wanted(every)))


@_eager
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
    every = headers(name, x, group, split_axis, concat_axis, len(sizes or ()))
    shape = present(name, every, group)
    cut, join = axis_of(name, split_axis, shape), axis_of(name, concat_axis, shape)
    free = {join} if sizes is None or cut != join else {cut}
    if sizes is None:
        free -= {cut}
    same_but(name, every, group, free)
    own = pieces_of(name, x.shape[cut], cut, group, sizes)
    received = tuple(h.shape[join] for h in every if h.shape is not None)
    if cut == join or sizes is not None:
        matrix = [own] * group.size
        if sizes is not None and group.size > 1:
            matrix = [tuple(row) for row in consult_sizes(own, group)]
        if cut == join:
            received = tuple(row[group.rank] for row in matrix)
        elif len(set(matrix)) > 1:
            raise CommError(
                f"{name}: pieces of {matrix[0]} and {max(matrix, key=matrix[0].__ne__)} along axis "
                f"{cut}, to be joined along axis {join}; allowed: the same sizes on every rank"
            )
    move = AllToAll(group, Like.of(x), cut, join, own, received)
    return _result(apply(name, move, x, wants=wanted(every)))


@_eager
def send(x: torch.Tensor, to: int, group: Group | None = None) -> None:
    """This rank's tensor to rank ``to`` of the group, which calls `recv`.

    Backward: what `recv` there got as gradient; call ``comm.backward()`` where there is no loss.
    Exactness: bitwise. Returns when the tensor has gone; with gloo the receiver must have come.

    Raises:
        CommError: no such rank in the group, or this one.
        ExchangeError: the other rank does not come within the group's timeout; names it.
    """
    group = peer_group("send", to, group)
    if group.check:
        send_header(Header.of("send", x), to, group)
    check_tensor("send", x)
    own = Header.of("send", x)
    apply(f"send to rank {group.ranks[to]}", Send(group, to, Like.of(x)), x, wants=own.wants)


@_eager
def recv(
    source: int,
    group: Group | None = None,
    *,
    like: torch.Tensor | None = None,
    device: Device = None,
) -> torch.Tensor:
    """The tensor that rank ``source`` of the group sends by `send`.

    Backward: sends the gradient back. Exactness: bitwise.

    Args:
        source: place in the group; in the world, the rank.
        group: None: all ranks.
        like: in a group without ``check`` a tensor of the shape, dtype and device of the one that
            comes, which requires a gradient if that one does; else ignored.
        device: where the result goes (None: to the CPU, with NCCL to the current GPU).

    Raises:
        CommError: no such rank in the group, or this one; ``like`` is missing.
        ExchangeError: the other rank does not come within the group's timeout; names it.
    """
    group = peer_group("recv", source, group)
    sent = receive_header(source, group) if group.check else Header.of("send", like)
    if sent.shape is None:
        why = "brings no tensor that can travel" if group.check else "is not checked: pass like="
        raise CommError(f"recv from rank {group.ranks[source]} of {group}, which {why}")
    move = Receive(group, source, template(sent, like, group, device))
    return _result(apply(f"recv from rank {group.ranks[source]}", move, None, wants=sent.wants))


def _sum_all(name: str, x: torch.Tensor, group: Group | None, *, mean: bool) -> torch.Tensor:
    group = member(group, name)
    every = equal(name, x, group)
    must_add_up(name, x, mean=mean)
    return _result(apply(name, SumAll(group, Like.of(x), mean), x, wants=wanted(every)))


def _extreme(
    name: str, x: torch.Tensor, group: Group | None, op: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    """The extreme is found first; then ``x`` where it is extreme, else 0, takes part in a sum of
    which the extreme is the known result: that sum's gradient is the one that is due.
    """
    group = member(group, name)
    every = equal(name, x, group)
    must_add_up(name, x, order=True)
    with together(f"{name} in {group}"):
        value = extremum(x.detach(), group, op)
    if not wanted(every):
        return value
    chosen = torch.where(x.detach() == value, x, torch.zeros_like(x))
    return _result(apply(name, Known(SumAll(group, Like.of(x)), value), chosen, wants=True))


def _result(y: torch.Tensor | None) -> torch.Tensor:
    """The result of an operator that has one on every rank."""
    assert y is not None
    return y
