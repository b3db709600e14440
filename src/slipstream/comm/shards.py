"""Collectives that split tensors along an axis, or join them; see ``collectives``.

Pieces of unequal size are sent and received one by one, directly from and into the whole tensor
where the pieces are contiguous: along the first axis. Sums add the pieces in the order of the group
on the rank that owns the result, so half types are summed in fp32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.comm.groups import Group
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.comm.wire import exchange_pieces, transfer_in_group, wire_view
from slipstream.transport.p2p import gather_all, swap


@dataclass(frozen=True)
class _Sharded:
    """A tensor of spec ``whole``, split along ``axis`` into pieces of ``sizes``, one a rank."""

    group: Group
    whole: TensorSpec
    axis: int
    sizes: tuple[int, ...]

    @property
    def piece(self) -> TensorSpec:
        """The spec of this rank's piece."""
        return self.whole.resized(self.sizes[self.group.rank], self.axis)

    def split(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The ranks' pieces, as views."""
        return whole.split_with_sizes(self.sizes, self.axis)


class Gather(_Sharded):
    """The ranks' pieces concatenated at the root."""

    @property
    def output(self) -> TensorSpec | None:
        return self.whole if self.group.rank == 0 else None

    @property
    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.group.rank:
            transfer_in_group({}, {0: x}, self.group)
            return None
        out = self.whole.empty()
        local, *others = self.split(out)
        transfer_in_group(dict(enumerate(others, 1)), {}, self.group, (local, x))
        return out


class Scatter(_Sharded):
    """The root's tensor, split over the ranks."""

    @property
    def output(self) -> TensorSpec:
        return self.piece

    @property
    def adjoint(self) -> Gather:
        return Gather(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: torch.Tensor | None) -> torch.Tensor:
        out = self.piece.empty()
        if self.group.rank or x is None:
            transfer_in_group({0: out}, {}, self.group)
            return out
        local, *others = self.split(x)
        transfer_in_group({}, dict(enumerate(others, 1)), self.group, (out, local))
        return out


class AllGatherOperation(_Sharded):
    """The ranks' pieces concatenated on every rank.

    Equal pieces go through gloo's own all-gather: its ring is faster beside other exchanges than
    sends from every rank to every rank. It takes equal pieces only.
    """

    @property
    def output(self) -> TensorSpec:
        return self.whole

    @property
    def adjoint(self) -> ReduceScatterOperation:
        return ReduceScatterOperation(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group, x = self.group, x.contiguous()
        if group.size == 1 or len(set(self.sizes)) > 1:
            out = self.whole.empty()
            exchange_pieces(self.split(out), [x] * group.size, group)
            return out
        out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
        gather_all(wire_view(out), wire_view(x), group.members)
        if self.axis == 0 and group.in_order:
            return out
        pieces = out.chunk(group.size)
        return torch.cat([pieces[rank] for rank in group.process_group_ranks], self.axis)


class ReduceScatterOperation(_Sharded):
    """The sum of the ranks' tensors, split over the ranks.

    Pieces are sent to their owners, who add them up: gloo's own reduce-scatter sends twice the
    bytes that it needs (torch 2.13).
    """

    @property
    def output(self) -> TensorSpec:
        return self.piece

    @property
    def adjoint(self) -> AllGatherOperation:
        return AllGatherOperation(self.group, self.whole, self.axis, self.sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group, pieces = self.group, self.split(x)
        if group.size == 2:  # a single addition, so rounded once in any dtype
            peer, local = 1 - group.rank, pieces[group.rank]
            out = torch.empty_like(local, memory_format=torch.contiguous_format)
            transfer_in_group({peer: out}, {peer: pieces[peer]}, group)
            return out.add_(local)
        received = x.new_empty(group.size, *self.piece.shape)
        exchange_pieces(received.unbind(), pieces, group)
        return received.sum(0, dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class AllToAllOperation:
    """Split along ``split_axis`` into ``send_sizes``, piece ``i`` for rank ``i``; concatenate what
    the ranks send along ``concat_axis``, where the pieces have ``receive_sizes``.

    Attributes:
        input: the spec of this rank's tensor.
        equal: whether all pieces of all ranks have one size, which every rank must know alike.
    """

    group: Group
    input: TensorSpec
    split_axis: int
    concat_axis: int
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    equal: bool

    @property
    def output(self) -> TensorSpec:
        piece = self.input.resized(self.send_sizes[self.group.rank], self.split_axis)
        return piece.resized(sum(self.receive_sizes), self.concat_axis)

    @property
    def adjoint(self) -> AllToAllOperation:
        axes, sizes = (self.concat_axis, self.split_axis), (self.receive_sizes, self.send_sizes)
        return AllToAllOperation(self.group, self.output, *axes, *sizes, self.equal)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group = self.group
        if self.equal and _is_small(x, group):
            rows = _swap_equal_pieces(x, self.split_axis, group)
            if self.concat_axis == 0:
                return rows
            return torch.cat(rows.chunk(group.size), self.concat_axis)
        out = self.output.empty()
        received = out.split_with_sizes(self.receive_sizes, self.concat_axis)
        exchange_pieces(received, x.split_with_sizes(self.send_sizes, self.split_axis), group)
        return out


_SMALL_PIECE_BYTES = 2**17
"""Up to this size of a piece latency costs more than bandwidth."""


def _is_small(x: torch.Tensor, group: Group) -> bool:
    """Whether gloo's own all-to-all is faster for equal pieces of ``x``.

    It takes half the time of sends and receives while latency dominates, and longer than they do
    once bandwidth does, see ``transport.p2p``.
    """
    return group.size > 1 and 0 < x.nbytes <= _SMALL_PIECE_BYTES * group.size and group.in_order


def _swap_equal_pieces(x: torch.Tensor, axis: int, group: Group) -> torch.Tensor:
    """Send equal pieces along ``axis`` to the ranks; return theirs, concatenated along axis 0."""
    rows = x.contiguous() if axis == 0 else torch.cat(x.chunk(group.size, axis))
    received = torch.empty_like(rows)
    swap(wire_view(received), wire_view(rows), group.members)
    return received
