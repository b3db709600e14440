"""Linear maps between the tensors of a group's ranks, each with its adjoint; no autograd here.

A map is known on every rank by values (sizes, dtype) before it runs. ``move(x)`` runs it: ``x`` is
this rank's tensor, or None where the map takes none from it; so is what it returns. The adjoint of
a map A is the A* of ``<A x, y> = <x, A* y>``, summed over ranks: what backward of the operator is.

    AllReduce <-> AllReduce            Broadcast <-> Sum          Gather <-> Scatter
    AllGather <-> ReduceScatter     AllToAll <-> AllToAll      Send <-> Receive

Those that cut tensors, or join them, are in ``cuts``. `Extreme` alone is not linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.distributed as dist

from slipstream.comm.groups import Group
from slipstream.comm.shards import AllGather, AllToAll, Gather, ReduceScatter, Scatter
from slipstream.comm.wire import Like, Maybe, carry, copy, wire

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Extreme",
    "Gather",
    "Like",
    "Maybe",
    "Move",
    "Receive",
    "ReduceScatter",
    "Scatter",
    "Send",
    "Sum",
]


class Move(Protocol):
    """A linear map between the ranks' tensors."""

    @property
    def group(self) -> Group:
        """The ranks that run it."""

    @property
    def output(self) -> Like | None:
        """What this rank gets; None where it gets nothing."""

    @property
    def adjoint(self) -> Move:
        """The map of the gradients, back."""

    def __call__(self, x: Maybe) -> Maybe:
        """Run on all ranks of the group, this rank's tensor being ``x``."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The sum on every rank, or (``mean``) that over the number of ranks."""

    group: Group
    output: Like
    mean: bool = False

    @property
    def adjoint(self) -> Self:
        return self

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        out = copy(x)
        if self.group.size > 1:
            dist.all_reduce(wire(out), group=self.group.members)
        return out.div_(self.group.size) if self.mean else out


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest or the smallest value of any rank, element by element, on every rank.

    ``adjoint`` is that of the sum: what flows back where this rank's value is the extreme.
    """

    group: Group
    output: Like
    op: dist.ReduceOp.RedOpType

    @property
    def adjoint(self) -> AllReduce:
        return AllReduce(self.group, self.output)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        out = copy(x)
        if self.group.size > 1:
            dist.all_reduce(out, op=self.op, group=self.group.members)
        return out


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The root's tensor on every rank; ``output`` is like it."""

    group: Group
    output: Like

    @property
    def adjoint(self) -> Sum:
        return Sum(self.group, self.output)

    def __call__(self, x: Maybe) -> torch.Tensor:
        if self.group.rank == 0:
            assert x is not None
            out = copy(x)
        else:
            out = self.output.empty()
        if self.group.size > 1:
            root = self.group.places[0]
            dist.broadcast(wire(out), group=self.group.members, group_src=root)
        return out


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum at the root, from tensors like ``each`` on every rank."""

    group: Group
    each: Like

    @property
    def output(self) -> Like | None:
        return self.each if self.group.rank == 0 else None

    @property
    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.each)

    def __call__(self, x: Maybe) -> Maybe:
        assert x is not None
        out = copy(x)  # on the other ranks, too: gloo leaves partial sums in it
        if self.group.size > 1:
            root = self.group.places[0]
            dist.reduce(wire(out), group=self.group.members, group_dst=root)
        return out if self.group.rank == 0 else None


@dataclass(frozen=True, slots=True)
class Send:
    """This rank's tensor, like ``each``, to ``peer``, a rank of the group, where `Receive` runs."""

    group: Group
    peer: int
    each: Like
    output: None = None

    @property
    def adjoint(self) -> Receive:
        return Receive(self.group, self.peer, self.each)

    def __call__(self, x: Maybe) -> None:
        assert x is not None
        carry({}, {self.peer: x}, self.group)


@dataclass(frozen=True, slots=True)
class Receive:
    """The tensor that ``peer`` (a rank of the group) sends."""

    group: Group
    peer: int
    output: Like

    @property
    def adjoint(self) -> Send:
        return Send(self.group, self.peer, self.output)

    def __call__(self, x: Maybe) -> torch.Tensor:
        out = self.output.empty()
        carry({self.peer: out}, {}, self.group)
        return out
