"""Every operator beside the bare calls of torch.distributed that do the same; for ``operators.py``.

The bare calls move the same data, out of place, into the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slipstream import comm

Map = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """An operator: the bare call, the bare call of its backward, and ours."""

    forward: Map
    backward: Map
    ours: Callable[[torch.Tensor, comm.Group], torch.Tensor | None]


def cases(like: torch.Tensor) -> dict[str, Case]:
    """The operators on matrices ``like`` this one, between two ranks."""
    return _whole(like) | _sharded(like, 0, "") | _sharded(like, 1, ", axis 1")


def _whole(like: torch.Tensor) -> dict[str, Case]:
    """Operators that keep the shape."""
    world, rank = dist.get_world_size(), dist.get_rank()
    root = rank == 0
    saved: list[torch.Tensor] = []

    def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, op)
        return out

    def mean(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x).div_(world)

    def largest(x: torch.Tensor) -> torch.Tensor:
        saved[:] = x, all_reduce(x, dist.ReduceOp.MAX)
        return saved[1]

    def where_largest(gradient: torch.Tensor) -> torch.Tensor:
        return torch.where(saved[0] == saved[1], all_reduce(gradient), 0)

    def broadcast(x: torch.Tensor | None) -> torch.Tensor:
        out = x.clone() if root and x is not None else torch.empty_like(like)
        dist.broadcast(out, 0)
        return out

    def reduce(x: torch.Tensor) -> torch.Tensor | None:
        out = x.clone()
        dist.reduce(out, 0)
        return out if root else None

    def send(x: torch.Tensor) -> None:
        dist.send(x, 1 - rank)

    def recv(_: object) -> torch.Tensor:
        out = torch.empty_like(like)
        dist.recv(out, 1 - rank)
        return out

    def send_or_recv(x: torch.Tensor, group: comm.Group) -> torch.Tensor | None:
        if not root:
            return comm.recv(0, group, like=x)
        comm.send(x, 1, group)
        return None

    ends: tuple[Map, Map] = (send, recv) if root else (recv, send)
    return {
        "broadcast": Case(broadcast, reduce, comm.broadcast),
        "reduce_sum": Case(reduce, broadcast, comm.reduce_sum),
        "all_reduce_sum": Case(all_reduce, all_reduce, comm.all_reduce_sum),
        "all_reduce_mean": Case(mean, mean, comm.all_reduce_mean),
        "all_reduce_max": Case(largest, where_largest, comm.all_reduce_max),
        "send, recv": Case(*ends, send_or_recv),
    }


def _sharded(like: torch.Tensor, axis: int, suffix: str) -> dict[str, Case]:
    """Operators that split along ``axis``, or join."""
    world, rank = dist.get_world_size(), dist.get_rank()
    root = rank == 0
    whole, piece = list(like.shape), list(like.shape)
    piece[axis] //= world

    def gather(x: torch.Tensor) -> torch.Tensor | None:
        if not root:
            dist.gather(x, None, 0)
            return None
        out = x.new_empty(world * x.shape[0], x.shape[1])
        dist.gather(x, list(out.chunk(world)), 0)
        return out if axis == 0 else torch.cat(out.chunk(world), axis)

    def scatter(shape: list[int], x: torch.Tensor | None) -> torch.Tensor:
        out = like.new_empty(shape)
        pieces = None
        if root and x is not None:
            pieces = [p.contiguous() for p in x.chunk(world, axis)]
        dist.scatter(out, pieces, 0)
        return out

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(world * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(out, x)
        return out if axis == 0 else torch.cat(out.chunk(world), axis)

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        rows = x if axis == 0 else torch.cat(x.chunk(world, axis))
        out = x.new_empty(rows.shape[0] // world, rows.shape[1])
        dist.reduce_scatter_tensor(out, rows)
        return out

    def all_to_all(split: int, concat: int, x: torch.Tensor) -> torch.Tensor:
        rows = x if split == 0 else torch.cat(x.chunk(world, split))
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows)
        return out if concat == 0 else torch.cat(out.chunk(world), concat)

    forward, backward = partial(all_to_all, 0, axis), partial(all_to_all, axis, 0)
    return {
        f"gather{suffix}": Case(gather, partial(scatter, whole), partial(comm.gather, axis=axis)),
        f"all_gather{suffix}": Case(
            all_gather, reduce_scatter, partial(comm.all_gather, axis=axis)
        ),
        f"scatter{suffix}": Case(partial(scatter, piece), gather, partial(comm.scatter, axis=axis)),
        f"reduce_scatter_sum{suffix}": Case(
            reduce_scatter, all_gather, partial(comm.reduce_scatter_sum, axis=axis)
        ),
        f"all_to_all{suffix}": Case(forward, backward, partial(comm.all_to_all, concat_axis=axis)),
    }
