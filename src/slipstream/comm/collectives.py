"""Collectives as linear maps between the tensors of a group's ranks, each with its adjoint.

A collective knows all sizes and dtypes before it runs, so that every rank can build it alike.
``collective(x)`` runs it: ``x`` is this rank's input, or None where it takes none, and likewise for
the result. The adjoint A* of a map A satisfies ``<A x, y> = <x, A* y>``, summed over ranks; it is
the operator's backward. No autograd here.

    AllReduce <-> AllReduce         Broadcast <-> Reduce          Gather <-> Scatter
    AllGather <-> ReduceScatter     AllToAll <-> AllToAll         Send <-> Receive

Collectives that split or join tensors are in ``shards``. Minimum and maximum are not linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from slipstream.comm.groups import Group
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.comm.wire import contiguous_copy, transfer_in_group, wire_view

Reduction = Literal["sum", "mean", "max", "min"]

_EXTREMES = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Collective(Protocol):
    """A linear map between the ranks' tensors."""

    @property
    def group(self) -> Group:
        """The ranks that run it."""

    @property
    def output(self) -> TensorSpec | None:
        """The spec of this rank's result; None where it gets none."""

    @property
    def adjoint(self) -> Collective:
        """The map of the gradients."""

    def __call__(self, x: Any) -> torch.Tensor | None:
        """Run on all ranks of the group with this rank's tensor ``x``."""


@dataclass(frozen=True, slots=True)
class AllReduceOperation:
    """The reduction of the ranks' tensors, element by element, on every rank.

    The ``adjoint`` of a minimum or maximum is that of the sum; backward then masks it to where this
    rank's value is the result.
    """

    group: Group
    output: TensorSpec
    reduction: Reduction = "sum"

    @property
    def is_extreme(self) -> bool:
        """Whether it is a minimum or a maximum."""
        return self.reduction in _EXTREMES

    @property
    def adjoint(self) -> AllReduceOperation:
        return AllReduceOperation(self.group, self.output) if self.is_extreme else self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = contiguous_copy(x)
        if self.group.size > 1:
            op = _EXTREMES.get(self.reduction, dist.ReduceOp.SUM)
            dist.all_reduce(wire_view(out), op=op, group=self.group.members)
        return out.div_(self.group.size) if self.reduction == "mean" else out


@dataclass(frozen=True, slots=True)
class BroadcastOperation:
    """The root's tensor on every rank."""

    group: Group
    output: TensorSpec

    @property
    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.output)

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        # Elsewhere x may be a tensor that stands in for one, see `autograd`.
        out = self.output.empty() if self.group.rank or x is None else contiguous_copy(x)
        if self.group.size > 1:
            root = self.group.process_group_ranks[0]
            dist.broadcast(wire_view(out), group=self.group.members, group_src=root)
        return out


@dataclass(frozen=True, slots=True)
class Reduce:
    """The sum at the root, from tensors of the spec ``input`` on every rank."""

    group: Group
    input: TensorSpec

    @property
    def output(self) -> TensorSpec | None:
        return self.input if self.group.rank == 0 else None

    @property
    def adjoint(self) -> BroadcastOperation:
        return BroadcastOperation(self.group, self.input)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        out = contiguous_copy(x)  # on every rank: gloo leaves partial sums in it
        if self.group.size > 1:
            root = self.group.process_group_ranks[0]
            dist.reduce(wire_view(out), group=self.group.members, group_dst=root)
        return out if self.group.rank == 0 else None


@dataclass(frozen=True, slots=True)
class Send:
    """This rank's tensor goes to ``peer``, a rank of the group, which runs `Receive`."""

    group: Group
    peer: int
    input: TensorSpec
    output: None = None

    @property
    def adjoint(self) -> Receive:
        return Receive(self.group, self.peer, self.input)

    def __call__(self, x: torch.Tensor) -> None:
        transfer_in_group({}, {self.peer: x}, self.group)


@dataclass(frozen=True, slots=True)
class Receive:
    """The tensor that ``peer``, a rank of the group, sends."""

    group: Group
    peer: int
    output: TensorSpec

    @property
    def adjoint(self) -> Send:
        return Send(self.group, self.peer, self.output)

    def __call__(self, x: object) -> torch.Tensor:
        out = self.output.empty()
        transfer_in_group({self.peer: out}, {}, self.group)
        return out
