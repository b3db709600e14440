"""Linear maps that cut tensors along an axis, or join them; see ``moves``.

Pieces travel through ``wire`` where sizes may differ, and straight out of and into the tensors that
they are cut from where those pieces are contiguous: along the first axis. A sum adds the pieces in
the order of the group on its owner's rank, so half types are added up in fp32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.comm.groups import Group
from slipstream.comm.wire import Like, Maybe, carry, exchange, wire
from slipstream.transport.p2p import gather_all, swap


@dataclass(frozen=True, slots=True)
class _Cut:
    """A tensor like ``whole``, cut along ``axis`` into pieces of ``sizes``, one for each rank."""

    group: Group
    whole: Like
    axis: int
    sizes: tuple[int, ...]

    @property
    def piece(self) -> Like:
        """This rank's piece."""
        return self.whole.sized(self.sizes[self.group.rank], self.axis)

    def split(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The ranks' pieces, views."""
        return whole.split_with_sizes(self.sizes, self.axis)


class Gather(_Cut):
    """The ranks' pieces one behind the other, at the root alone."""

    __slots__ = ()

    @property
    def output(self) -> Like | None:
        return self.whole if self.group.rank == 0 else None

    @property
    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> Maybe:
        assert x is not None
        if self.group.rank:
            carry({}, {0: x}, self.group)
            return None
        out = self.whole.empty()
        own, *others = self.split(out)
        carry(dict(enumerate(others, 1)), {}, self.group, (own, x))
        return out


class Scatter(_Cut):
    """The root's tensor, cut."""

    __slots__ = ()

    @property
    def output(self) -> Like:
        return self.piece

    @property
    def adjoint(self) -> Gather:
        return Gather(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        out = self.piece.empty()
        if self.group.rank:
            carry({0: out}, {}, self.group)
            return out
        assert x is not None
        own, *others = self.split(x)
        carry({}, dict(enumerate(others, 1)), self.group, (out, own))
        return out


class AllGather(_Cut):
    """The ranks' pieces one behind the other, on every rank.

    [Note: Gloo's own all-gather] takes equal pieces only, but passes them around a ring, which is
    faster beside other exchanges than pieces sent by everybody to everybody.
    """

    __slots__ = ()

    @property
    def output(self) -> Like:
        return self.whole

    @property
    def adjoint(self) -> ReduceScatter:
        return ReduceScatter(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        group, x = self.group, x.contiguous()
        if group.size == 1 or len(set(self.sizes)) > 1:
            out = self.whole.empty()
            exchange(self.split(out), [x] * group.size, group)
            return out
        out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
        gather_all(wire(out), wire(x), group.members)
        if self.axis == 0 and group.in_order:
            return out
        pieces = out.chunk(group.size)
        return torch.cat([pieces[place] for place in group.places], self.axis)


class ReduceScatter(_Cut):
    """The sum of the ranks' tensors, cut.

    [Note: Gloo's own reduce-scatter] sends twice the bytes that it needs (torch 2.13): pieces are
    sent to their owners, who add them up.
    """

    __slots__ = ()

    @property
    def output(self) -> Like:
        return self.piece

    @property
    def adjoint(self) -> AllGather:
        return AllGather(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        group, pieces = self.group, self.split(x)
        if group.size == 2:  # one addition, rounded once, too
            peer, own = 1 - group.rank, pieces[group.rank]
            out = torch.empty_like(own, memory_format=torch.contiguous_format)
            carry({peer: out}, {peer: pieces[peer]}, group)
            return out.add_(own)
        received = x.new_empty(group.size, *self.piece.shape)
        exchange(received.unbind(), pieces, group)
        return received.sum(0, dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Cut along ``cut`` into ``send_sizes``, piece ``i`` for rank ``i``; what comes is joined along
    ``join``, where the pieces have ``receive_sizes``. ``input``: like this rank's tensor.
    ``alike``: whether all pieces of all ranks are, which every rank must know alike.
    """

    group: Group
    input: Like
    cut: int
    join: int
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    alike: bool = False

    @property
    def output(self) -> Like:
        piece = self.input.sized(self.send_sizes[self.group.rank], self.cut)
        return piece.sized(sum(self.receive_sizes), self.join)

    @property
    def adjoint(self) -> AllToAll:
        sizes = self.receive_sizes, self.send_sizes
        return AllToAll(self.group, self.output, self.join, self.cut, *sizes, self.alike)

    def __call__(self, x: Maybe) -> torch.Tensor:
        assert x is not None
        group = self.group
        if self.alike and _latency_counts(x, group):
            come = _swapped(x, self.cut, group)
            return come if self.join == 0 else torch.cat(come.chunk(group.size), self.join)
        out = self.output.empty()
        received = out.split_with_sizes(self.receive_sizes, self.join)
        exchange(received, x.split_with_sizes(self.send_sizes, self.cut), group)
        return out


_SMALL = 2**17
"""Bytes of a piece up to which latency counts more than bandwidth."""


def _latency_counts(x: torch.Tensor, group: Group) -> bool:
    """Whether equal pieces of ``x`` are better off in gloo's own all-to-all.

    It takes half the time as long as latency counts, and more than sends and receives where
    bandwidth does, see ``transfer``.
    """
    return group.size > 1 and 0 < x.nbytes <= _SMALL * group.size and group.in_order


def _swapped(x: torch.Tensor, axis: int, group: Group) -> torch.Tensor:
    """Equal pieces along ``axis`` go to the ranks; what comes, joined along the first axis."""
    rows = x.contiguous() if axis == 0 else torch.cat(x.chunk(group.size, axis))
    come = torch.empty_like(rows)
    swap(wire(come), wire(rows), group.members)
    return come
