"""Linear maps between the tensors of a group's ranks, each with its adjoint; no autograd here.

A map is known on every rank by values (sizes, dtype) before it runs. ``move(x)`` runs it: ``x`` is
this rank's tensor, or None where the map takes none from it; so is what it returns. The adjoint of
a map A is the A* of ``<A x, y> = <x, A* y>``, summed over ranks: what backward of the operator is.

    SumAll <-> SumAll            Broadcast <-> Sum          Gather <-> Scatter
    GatherAll <-> SumScatter     AllToAll <-> AllToAll      Send <-> Receive

Pieces travel through ``transfer`` where sizes may differ; a sum adds the pieces in the order of the
group on its owner's rank, so half types are added up in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.distributed as dist

from slipstream.comm.groups import Group
from slipstream.comm.transfer import all_to_all, gather_all, transfer

Maybe = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Like:
        """Shape, dtype and device of ``x``."""
        return cls(tuple(x.shape), x.dtype, x.device)

    def empty(self) -> torch.Tensor:
        """A new tensor, contiguous."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        """A new tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def sized(self, size: int, axis: int) -> Like:
        """As long as ``size`` along ``axis``."""
        return replace(self, shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]))


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
class SumAll:
    """The sum on every rank, or (``mean``) that over the number of ranks."""

    group: Group
    output: Like
    mean: bool = False

    @property
    def adjoint(self) -> Self:
        return self

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        out = _copy(x)
        if self.group.size > 1:
            dist.all_reduce(_wire(out), group=self.group.members)
        return out.div_(self.group.size) if self.mean else out


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
            out = _copy(x)
        else:
            out = self.output.empty()
        if self.group.size > 1:
            root = self.group.places[0]
            dist.broadcast(_wire(out), group=self.group.members, group_src=root)
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
        out = _copy(x)  # on the other ranks, too: gloo leaves partial sums in it
        if self.group.size > 1:
            root = self.group.places[0]
            dist.reduce(_wire(out), group=self.group.members, group_dst=root)
        return out if self.group.rank == 0 else None


@dataclass(frozen=True, slots=True)
class Gather:
    """The ranks' pieces one behind the other along ``axis``, at the root alone.

    ``whole``: like the result; ``sizes``: of the pieces, along the axis.
    """

    group: Group
    whole: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def output(self) -> Like | None:
        return self.whole if self.group.rank == 0 else None

    @property
    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> Maybe:
        assert x is not None
        group = self.group
        if group.rank:
            transfer({}, {group.places[0]: _wire(x.contiguous())}, group.members)
            return None
        pieces = [x, *(self.whole.sized(size, self.axis).empty() for size in self.sizes[1:])]
        if group.size > 1:
            received = zip(group.places[1:], pieces[1:], strict=True)
            transfer({place: _wire(piece) for place, piece in received}, {}, group.members)
        return torch.cat(pieces, self.axis)


@dataclass(frozen=True, slots=True)
class Scatter:
    """The root's tensor cut along ``axis``; fields as of `Gather`, its adjoint."""

    group: Group
    whole: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def output(self) -> Like:
        return self.whole.sized(self.sizes[self.group.rank], self.axis)

    @property
    def adjoint(self) -> Gather:
        return Gather(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        group = self.group
        if group.rank:
            out = self.output.empty()
            transfer({group.places[0]: _wire(out)}, {}, group.members)
            return out
        assert x is not None
        own, *others = x.split(self.sizes, self.axis)
        if group.size > 1:
            pieces = zip(group.places[1:], others, strict=True)
            transfer({}, {place: _wire(p.contiguous()) for place, p in pieces}, group.members)
        return _copy(own)


@dataclass(frozen=True, slots=True)
class GatherAll:
    """The ranks' pieces one behind the other along ``axis``, on every rank; fields as of `Gather`.

    [Note: Gloo's own all-gather] takes equal pieces only, but passes them around a ring, which is
    faster beside other exchanges than pieces sent by everybody to everybody.
    """

    group: Group
    output: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def adjoint(self) -> SumScatter:
        return SumScatter(self.group, self.output, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        group, x = self.group, x.contiguous()
        if group.size == 1:
            return _copy(x)
        if len(set(self.sizes)) > 1:
            pieces = [self.output.sized(size, self.axis).empty() for size in self.sizes]
            _exchange(pieces, [x] * group.size, group)
            return torch.cat(pieces, self.axis)
        in_place = self.axis == 0 and group.places == tuple(range(group.size))
        out = self.output.empty() if in_place else x.new_empty(group.size, *x.shape)
        gather_all(_wire(out), _wire(x), group.members)
        return out if in_place else torch.cat([out[p] for p in group.places], self.axis)


@dataclass(frozen=True, slots=True)
class SumScatter:
    """The sum, cut along ``axis``; ``whole``: like each rank's tensor, ``sizes``: of the pieces.

    [Note: Gloo's own reduce-scatter] sends twice the bytes that it needs (torch 2.13): pieces are
    sent to their owners, who add them up.
    """

    group: Group
    whole: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def output(self) -> Like:
        return self.whole.sized(self.sizes[self.group.rank], self.axis)

    @property
    def adjoint(self) -> GatherAll:
        return GatherAll(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        group = self.group
        if group.size == 1:
            return _copy(x)
        pieces = [p.contiguous() for p in x.split(self.sizes, self.axis)]
        received = x.new_empty(group.size, *self.output.shape)
        _exchange(received.unbind(), pieces, group)
        return received.sum(0)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Cut along ``cut`` into ``send_sizes``, piece ``i`` for rank ``i``; what comes is joined along
    ``join``, where the pieces have ``receive_sizes``. ``input``: like this rank's tensor.
    """

    group: Group
    input: Like
    cut: int
    join: int
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]

    @property
    def output(self) -> Like:
        cut = self.input.sized(self.send_sizes[self.group.rank], self.cut)
        return cut.sized(sum(self.receive_sizes), self.join)

    @property
    def adjoint(self) -> AllToAll:
        return AllToAll(
            self.group, self.output, self.join, self.cut, self.receive_sizes, self.send_sizes
        )

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        if self.group.size == 1:
            return _copy(x)
        pieces = [p.contiguous() for p in x.split(self.send_sizes, self.cut)]
        received = [self.output.sized(size, self.join).empty() for size in self.receive_sizes]
        _exchange(received, pieces, self.group)
        return torch.cat(received, self.join)


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
        target = self.group.places[self.peer]
        transfer({}, {target: _wire(x.contiguous())}, self.group.members)


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
        transfer({self.group.places[self.peer]: _wire(out)}, {}, self.group.members)
        return out


@dataclass(frozen=True, slots=True)
class Known:
    """A sum whose result is known already: nothing moves, but its adjoint is that of the sum."""

    sum: SumAll
    value: torch.Tensor

    @property
    def group(self) -> Group:
        return self.sum.group

    @property
    def output(self) -> Like:
        return self.sum.output

    @property
    def adjoint(self) -> SumAll:
        return self.sum

    def __call__(self, x: Maybe) -> torch.Tensor:
        return self.value


def extremum(x: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """The largest or smallest value on any rank, value by value; not linear, so without adjoint."""
    out = _copy(x)
    if group.size > 1:
        dist.all_reduce(out, op=op, group=group.members)
    return out


def _exchange(receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor], group: Group) -> None:
    """`all_to_all` by ranks of ``group``, whose order may be another than that of torch."""
    order = sorted(range(group.size), key=group.places.__getitem__)
    all_to_all(
        [_wire(receive[rank]) for rank in order],
        [_wire(send[rank]) for rank in order],
        group.members,
    )


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A new tensor, contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


def _wire(x: torch.Tensor) -> torch.Tensor:
    """A view in a dtype that every backend moves: complex as pairs, bool and 8-bit floats as bytes.

    A view of complex numbers may be added up, one of bytes may not.
    """
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype in _AS_BYTES else x


_AS_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
