"""Collectives that ``torch.compile`` keeps in its graph: operators of torch with a shape and a
gradient that are known without running them.

That is so where every rank has a result of a known shape, and uses it: in groups without ``check``,
with equal pieces. Elsewhere ranks compare what they do while they run, which is a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeGuard

import torch
from torch import Tensor

from slipstream.comm.autograd import graph_break, run
from slipstream.comm.collectives import AllReduceOperation, Reduction
from slipstream.comm.groups import Group, named
from slipstream.comm.shards import AllGatherOperation, AllToAllOperation, ReduceScatterOperation
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.comm.wire import SENT_AS_BYTES

P = ParamSpec("P")
Operator = Callable[Concatenate[Tensor, P], Tensor]


def traceable(in_graph: Callable[..., Tensor | None]) -> Callable[[Operator[P]], Operator[P]]:
    """Under ``torch.compile`` make an operator what ``in_graph`` returns for its arguments, where
    that is not None; else a graph break."""

    def decorate(operator: Operator[P]) -> Operator[P]:
        outside = graph_break(operator)

        @wraps(operator)
        def call(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                y = in_graph(x, *args, **kwargs)
                if y is not None:
                    return y
            return outside(x, *args, **kwargs)

        return call

    return decorate


def all_reduce_in_graph(reduction: Reduction) -> Callable[..., Tensor | None]:
    """A sum or a mean."""

    def in_graph(x: Tensor, group: Group | None = None) -> Tensor | None:
        if not _is_known(group) or not _has_reduction(x, reduction):
            return None
        y: Tensor = _all_reduce(x, reduction, group.name)
        return y

    return in_graph


def all_gather_in_graph(
    x: Tensor, group: Group | None = None, axis: int = 0, *, sizes: object = None
) -> Tensor | None:
    """Gather tensors of one shape, inside a graph."""
    if not _is_known(group) or sizes is not None or not -x.dim() <= axis < x.dim():
        return None
    y: Tensor = _all_gather(x, axis % x.dim(), group.name)
    return y


def reduce_scatter_in_graph(
    x: Tensor, group: Group | None = None, axis: int = 0, *, sizes: object = None
) -> Tensor | None:
    """Into pieces of one size."""
    if not _is_known(group) or sizes is not None or not _is_divisible(x, axis, group):
        return None
    if not _has_reduction(x, "sum"):
        return None
    y: Tensor = _reduce_scatter(x, axis % x.dim(), group.name)
    return y


def all_to_all_in_graph(
    x: Tensor,
    group: Group | None = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    sizes: object = None,
) -> Tensor | None:
    """Exchange pieces of one size, inside a graph."""
    if not _is_known(group) or sizes is not None or not _is_divisible(x, split_axis, group):
        return None
    if not -x.dim() <= concat_axis < x.dim():
        return None
    y: Tensor = _all_to_all(x, split_axis % x.dim(), concat_axis % x.dim(), group.name)
    return y


def _is_known(group: Group | None) -> TypeGuard[Group]:
    """Whether ranks compare nothing in a group, and this rank is in it."""
    return group is not None and not group.check and group.rank >= 0


def _has_reduction(x: Tensor, reduction: Reduction) -> bool:
    """Whether an operator computes that of a dtype; outside of a graph it refuses the others."""
    floating = x.is_floating_point() or x.is_complex()
    return x.dtype not in SENT_AS_BYTES and (reduction == "sum" or floating)


def _is_divisible(x: Tensor, axis: int, group: Group) -> bool:
    return -x.dim() <= axis < x.dim() and x.shape[axis] % group.size == 0


def _operator(name: str, arguments: str) -> Callable[[Callable[..., Tensor]], Any]:
    return torch.library.custom_op(
        f"slipstream::{name}",
        mutates_args=(),
        schema=f"(Tensor x, {arguments}, str group) -> Tensor",
    )


@_operator("all_reduce", "str reduction")
def _all_reduce(x: Tensor, reduction: Reduction, group: str) -> Tensor:
    collective = AllReduceOperation(named(group), TensorSpec.of(x), reduction)
    return _result(f"all_reduce_{reduction}", collective, x)


@_operator("all_gather", "int axis")
def _all_gather(x: Tensor, axis: int, group: str) -> Tensor:
    found = named(group)
    whole = TensorSpec.of(x).resized(x.shape[axis] * found.size, axis)
    collective = AllGatherOperation(found, whole, axis, (x.shape[axis],) * found.size)
    return _result("all_gather", collective, x)


@_operator("reduce_scatter", "int axis")
def _reduce_scatter(x: Tensor, axis: int, group: str) -> Tensor:
    found = named(group)
    pieces = (x.shape[axis] // found.size,) * found.size
    collective = ReduceScatterOperation(found, TensorSpec.of(x), axis, pieces)
    return _result("reduce_scatter_sum", collective, x)


@_operator("all_to_all", "int split_axis, int concat_axis")
def _all_to_all(x: Tensor, split_axis: int, concat_axis: int, group: str) -> Tensor:
    found = named(group)
    sent = (x.shape[split_axis] // found.size,) * found.size
    received = sent if split_axis == concat_axis else (x.shape[concat_axis],) * found.size
    axes = (split_axis, concat_axis)
    collective = AllToAllOperation(found, TensorSpec.of(x), *axes, sent, received, equal=True)
    return _result("all_to_all", collective, x)


def _result(name: str, collective: Any, x: Tensor) -> Tensor:
    y = run(name, collective, x.detach())
    assert y is not None
    return y


def _shape_of_all_reduce(x: Tensor, reduction: Reduction, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_of_all_gather(x: Tensor, axis: int, group: str) -> Tensor:
    return _resized(x, axis, x.shape[axis] * named(group).size)


def _shape_of_reduce_scatter(x: Tensor, axis: int, group: str) -> Tensor:
    return _resized(x, axis, x.shape[axis] // named(group).size)


def _shape_of_all_to_all(x: Tensor, split_axis: int, concat_axis: int, group: str) -> Tensor:
    size = named(group).size
    piece = _resized(x, split_axis, x.shape[split_axis] // size)
    return _resized(piece, concat_axis, piece.shape[concat_axis] * size)


def _resized(x: Tensor, axis: int, length: Any) -> Tensor:
    shape = list(x.shape)
    shape[axis] = length
    return x.new_empty(shape)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.arguments = inputs


def _adjoint_all_reduce(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _all_reduce(gradient, *ctx.arguments), None, None


def _adjoint_all_gather(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _reduce_scatter(gradient, *ctx.arguments), None, None


def _adjoint_reduce_scatter(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _all_gather(gradient, *ctx.arguments), None, None


def _adjoint_all_to_all(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    split_axis, concat_axis, group = ctx.arguments
    return _all_to_all(gradient, concat_axis, split_axis, group), None, None, None


_all_reduce.register_fake(_shape_of_all_reduce)
_all_gather.register_fake(_shape_of_all_gather)
_reduce_scatter.register_fake(_shape_of_reduce_scatter)
_all_to_all.register_fake(_shape_of_all_to_all)
_all_reduce.register_autograd(_adjoint_all_reduce, setup_context=_keep_arguments)
_all_gather.register_autograd(_adjoint_all_gather, setup_context=_keep_arguments)
_reduce_scatter.register_autograd(_adjoint_reduce_scatter, setup_context=_keep_arguments)
_all_to_all.register_autograd(_adjoint_all_to_all, setup_context=_keep_arguments)
