"""The oracle of the operators: plain torch functions of the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream import comm
from slipstream.comm.graphs import current

Tensors = list[torch.Tensor]


def total(xs: Tensors) -> torch.Tensor:
    return torch.stack(xs).sum(0)


def all_to_all_of(xs: Tensors, split_axis: int, concat_axis: int) -> Tensors:
    pieces = [x.chunk(len(xs), split_axis) for x in xs]
    return [torch.cat([p[r] for p in pieces], concat_axis) for r in range(len(xs))]


def min_max(xs: Tensors, of: Callable[..., Any]) -> Tensors:
    value = of(torch.stack([x.detach() for x in xs]), 0).values
    chosen = total([torch.where(x == value, x, torch.zeros_like(x)) for x in xs])
    return [value + chosen - chosen.detach()] * len(xs)


Reference = Callable[[Tensors, int, int], Sequence[torch.Tensor | None]]
REFERENCES: dict[str, Reference] = {
    "broadcast": lambda xs, a, b: [xs[0]] * len(xs),
    "reduce_sum": lambda xs, a, b: [total(xs), *[None] * (len(xs) - 1)],
    "all_reduce_sum": lambda xs, a, b: [total(xs)] * len(xs),
    "all_reduce_mean": lambda xs, a, b: [total(xs) / len(xs)] * len(xs),
    "all_reduce_max": lambda xs, a, b: min_max(xs, torch.max),
    "all_reduce_min": lambda xs, a, b: min_max(xs, torch.min),
    "gather": lambda xs, a, b: [torch.cat(xs, a), *[None] * (len(xs) - 1)],
    "all_gather": lambda xs, a, b: [torch.cat(xs, a)] * len(xs),
    "scatter": lambda xs, a, b: xs[0].chunk(len(xs), a),
    "reduce_scatter_sum": lambda xs, a, b: total(xs).chunk(len(xs), a),
    "all_to_all": lambda xs, a, b: all_to_all_of(xs, a, b),
}
AXES: dict[str, list[tuple[int, ...]]] = {name: [()] for name in REFERENCES} | {
    "gather": [(0,), (1,), (-1,)],
    "all_gather": [(0,), (1,), (-1,)],
    "scatter": [(0,), (1,), (-1,)],
    "reduce_scatter_sum": [(0,), (1,), (-1,)],
    "all_to_all": [(0, 0), (0, 1), (1, 0), (2, 0), (-1, -2)],
}
SHAPE = (6, 6, 12)


def inputs(size: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensors:
    """The ranks' tensors; values repeat, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-8, 9, tuple(shape), generator=generator).div(8).to(dtype)
        for _ in range(size)
    ]


def loss_of(y: torch.Tensor | None, rank: int) -> torch.Tensor | None:
    """A loss with a second derivative; None where this rank has no result."""
    return None if y is None else ((rank + 1) * y.square() + y * y * y / 3).sum()


def second_loss(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    return (gradient * gradient).sum() * (rank + 2) / 4


def expected(name: str, xs: Tensors, axes: tuple[int, ...]) -> tuple[list[Any], Tensors, Tensors]:
    """By rank of the group: results, gradients, and second gradients."""
    xs = [x.clone().requires_grad_() for x in xs]
    ys = REFERENCES[name](xs, *(*axes, 0, 0)[:2])
    losses = [loss_of(y, rank) for rank, y in enumerate(ys)]
    loss = torch.stack([v for v in losses if v is not None]).sum()
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    again = torch.stack([second_loss(g, rank) for rank, g in enumerate(first)]).sum()
    again = again + sum(x.sum() * 0 for x in xs)  # connects inputs that have no gradient
    second = torch.autograd.grad(again, xs, materialize_grads=True)
    return (
        [None if y is None else y.detach() for y in ys],
        [g.detach() for g in first],
        list(second),
    )


def measured(
    name: str, group: comm.Group, x: torch.Tensor, axes: tuple[int, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Result, gradient and second gradient on this rank; None for a missing one."""
    x = x.clone().requires_grad_()
    y = getattr(comm, name)(x, group, *axes)
    comm.backward(loss_of(y, group.rank), create_graph=True)
    first, x.grad = x.grad, None
    comm.backward(
        None if first is None or not first.requires_grad else second_loss(first, group.rank)
    )
    assert len(current()) == 0  # every backward has run
    return None if y is None else y.detach(), None if first is None else first.detach(), x.grad


def close(actual: torch.Tensor | None, reference: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Assert equality up to some roundings of ``dtype``; a missing gradient counts as zeros."""
    if reference is None:
        assert actual is None
        return
    if actual is None:
        assert not reference.any()
        return
    assert actual.dtype == dtype
    assert actual.shape == reference.shape
    if reference.numel():
        error, size = (
            (actual.double() - reference).abs().max(),
            reference.abs().max().clamp(min=1.0),
        )
        assert error <= 8 * torch.finfo(dtype).eps * size, (error, size)
