"""Where a split region of a model begins and ends, as linear maps with their adjoints.

A tensor is *whole* (the same on every rank, and so is its gradient), *split* (each rank has its
piece, and the gradient of it) or *partial* (what counts is the sum over ranks). Megatron's f and g
are ``copy_to_region`` and ``reduce_from_region``::

    whole   --copy_to_region-->  split region      backward: partial gradients are added up
    partial --reduce_from_region-->  whole             backward: the gradient as it is
    whole   --cut------>  split             backward: the gradients are joined
    split   --join----->  whole             backward: each rank takes its piece
    split   --join_in-->  split region      backward: partial gradients are added up and cut
    partial --sum_cut-->  split             backward: the gradients are joined
    split   --switch--->  split elsewhere   backward: the same, back

The operators of ``comm`` differentiate the sum of all ranks' losses; here all ranks hold one loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from slipstream.comm import Group
from slipstream.comm.apply import apply
from slipstream.comm.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Like,
    Maybe,
    Move,
    ReduceScatter,
)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A whole tensor as it is, at the entry of a split region; adjoint: the sum."""

    local: ClassVar[bool] = True  # nothing moves, so nothing is recorded
    group: Group
    output: Like

    @property
    def adjoint(self) -> _Total:
        return _Total(self.group, self.output)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        return x.view_as(x)


@dataclass(frozen=True, slots=True)
class _Total:
    """The sum of partial tensors; adjoint: the gradient as it is."""

    group: Group
    output: Like

    @property
    def adjoint(self) -> _Copy:
        return _Copy(self.group, self.output)

    def __call__(self, x: Maybe) -> torch.Tensor:
        return AllReduce(self.group, self.output)(x)


@dataclass(frozen=True, slots=True)
class _Cut:
    """This rank's piece of a whole tensor; adjoint: the pieces joined."""

    local: ClassVar[bool] = True
    group: Group
    whole: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def output(self) -> Like:
        return self.whole.sized(self.sizes[self.group.rank], self.axis)

    @property
    def adjoint(self) -> _Join:
        return _Join(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        start = sum(self.sizes[: self.group.rank])
        return x.narrow(self.axis, start, self.sizes[self.group.rank]).contiguous()


@dataclass(frozen=True, slots=True)
class _Join:
    """The pieces joined on every rank; adjoint: this rank's piece."""

    group: Group
    output: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def adjoint(self) -> _Cut:
        return _Cut(self.group, self.output, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        return AllGather(self.group, self.output, self.axis, self.sizes)(x)


def copy_to_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x``, whole, for layers that each work on a part of it or of their weights."""
    return _run("copy_to_region", _Copy(group, Like.of(x)), x)


def reduce_from_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' partial ``x``. Exactness: reordered."""
    return _run("reduce_from_region", _Total(group, Like.of(x)), x)


def cut(x: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """This rank's piece of a whole ``x``; pieces differ by one at most."""
    return _run("cut", _Cut(group, Like.of(x), axis, even(x.shape[axis], group)), x)


def join(x: torch.Tensor, group: Group, axis: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The whole, from pieces of ``sizes``."""
    return _run("join", _Join(group, Like.of(x).sized(sum(sizes), axis), axis, sizes), x)


def join_in(x: torch.Tensor, group: Group, axis: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """As ``join``, for layers that each work on a part of their weights."""
    return _run("join_in", AllGather(group, Like.of(x).sized(sum(sizes), axis), axis, sizes), x)


def sum_cut(x: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """This rank's piece of the sum of partial ``x``. Exactness: reordered."""
    return _run("sum_cut", ReduceScatter(group, Like.of(x), axis, even(x.shape[axis], group)), x)


def switch(x: torch.Tensor, group: Group, *, split: int, joined: int, length: int) -> torch.Tensor:
    """``x``, split along axis ``joined`` where the whole is ``length`` long, becomes whole there
    and split along axis ``split``; backward is the same, back. Exactness: bitwise.
    """
    sent, received = even(x.shape[split], group), even(length, group)
    alike = len(set(sent)) == len(set(received)) == 1
    return _run("switch", AllToAll(group, Like.of(x), split, joined, sent, received, alike), x)


def even(length: int, group: Group) -> tuple[int, ...]:
    """Sizes of the pieces of ``length``, which differ by one at most."""
    each, rest = divmod(length, group.size)
    return tuple(each + (rank < rest) for rank in range(group.size))


def _run(name: str, move: Move, x: torch.Tensor) -> torch.Tensor:
    wants = x.requires_grad and torch.is_grad_enabled()
    y = apply(name, move, x, wants=wants)
    assert y is not None
    return y
