"""Groups of ranks whose order counts: the first is the root, piece ``i`` goes to the ``i``-th.

torch sorts the ranks of a process group; here ``group([2, 0])`` has rank 2 before rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from slipstream.cluster.groups import new_group
from slipstream.errors import CommError
from slipstream.trace.recorder import Recorder

_numbers = itertools.count()
_named: WeakValueDictionary[str, Group] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Group:
    """An ordered set of ranks that exchange tensors; made by `group`.

    Attributes:
        ranks: of the world, in the group's order.
        process_group: None on a rank outside, and where one process trains alone.
        check: whether its ranks compare arguments before every operator, see `group`.
        rank: place of this process in ``ranks``; -1 outside.
        recorder: gets a span for each operator, forward and backward.
        name: in this process, see `named`.
    """

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None
    check: bool
    rank: int
    recorder: Recorder | None = None
    name: str = field(default_factory=lambda: f"group {next(_numbers)}", init=False)

    def __post_init__(self) -> None:
        _named[self.name] = self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def exchanges_signatures(self) -> bool:
        """Whether its ranks compare arguments: it has ``check``, and more than one rank."""
        return self.check and len(self.ranks) > 1

    @property
    def members(self) -> dist.ProcessGroup:
        """The process group, on a rank inside a group of two or more."""
        assert self.process_group is not None
        return self.process_group

    @cached_property
    def process_group_ranks(self) -> tuple[int, ...]:
        """The ranks in ``process_group`` of the group's ranks, in the group's order."""
        return tuple(map(sorted(self.ranks).index, self.ranks))

    @cached_property
    def in_order(self) -> bool:
        """Whether the process group has the ranks in the group's order."""
        return self.process_group_ranks == tuple(range(self.size))

    @cached_property
    def device(self) -> torch.device:
        """The device of tensors that ranks compare: the CPU, unless the group has NCCL alone."""
        alone = self.process_group is None
        on_cpu = alone or "gloo" in dist.get_backend_config(self.process_group)
        return torch.device("cpu" if on_cpu else "cuda")

    @property
    def destroyed(self) -> bool:
        """Whether the script has ended its process group."""
        if self.process_group is None or torch.compiler.is_compiling():
            return False
        return self.process_group not in dist.distributed_c10d._world.pg_names

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if self.size > 8 else "")
        return f"group [{shown}]"


def group(
    ranks: Sequence[int] | None = None,
    *,
    check: bool = True,
    timeout: timedelta | None = None,
    backend: str | None = None,
    recorder: Recorder | None = None,
) -> Group:
    """Make a group of ``ranks`` of the world, in this order; None means all of them.

    Every rank of the world makes the same groups in the same order, including groups that it is
    not in. In a single process the world is rank 0, and every operator is the identity.

    Args:
        ranks: the first is the root: it holds what is gathered or reduced, scattered or broadcast.
        check: compare operator, shapes and dtypes before data moves (one collective of 160 bytes a
            rank), so that a mistake raises on all ranks; and compare in backward which ranks have a
            gradient, so that a rank that ignores its result blocks nobody. Without it, all ranks
            must pass matching arguments and use their results.
        timeout: how long an operator waits for the other ranks (None: the world's timeout).
        backend: None: that of the world.
        recorder: see `Group`.

    Raises:
        CommError: a rank twice, no rank, or one that the world does not have.

    Example:
        >>> group([0]).ranks, group().size
        ((0,), 1)
    """
    alone = not (dist.is_available() and dist.is_initialized())
    world_size = 1 if alone else dist.get_world_size()
    members = tuple(range(world_size)) if ranks is None else tuple(ranks)
    unknown = [rank for rank in members if not 0 <= rank < world_size]
    if unknown or not members or len(set(members)) < len(members):
        raise CommError(
            f"a group of ranks {list(members)}; allowed: one or more of the {world_size} ranks "
            f"0 .. {world_size - 1}, each of them once"
        )
    if alone:
        return Group(members, None, check, 0, recorder)
    process_group = new_group(sorted(members), timeout=timeout, backend=backend)
    if process_group is None:
        return Group(members, None, check, -1, recorder)
    return Group(members, process_group, check, members.index(dist.get_rank()), recorder)


def group_of(
    process_group: dist.ProcessGroup | None, *, check: bool = True, recorder: Recorder | None = None
) -> Group:
    """Wrap a process group, e.g. of a dimension of a ``DeviceMesh``; None: the world's, if any."""
    if process_group is None:
        process_group = dist.group.WORLD if dist.is_available() else None
    if process_group is None:
        return Group((0,), None, check, 0, recorder)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    return Group(ranks, process_group, check, dist.get_rank(process_group), recorder)


def named(name: str) -> Group:
    """The group of a name: a compiled graph has no other way to mention it."""
    return _named[name]


def member(chosen: Group | None, operator: str) -> Group:
    """The group that an operator runs in: ``chosen``, or the world.

    Raises:
        CommError: this rank is not in it, or it was destroyed.
    """
    if chosen is None:
        return group_of(None)
    if chosen.rank < 0:
        raise CommError(
            f"{operator} in {chosen} on rank {dist.get_rank()}, which is not in that group; call "
            "it on the group's ranks only: if group.rank >= 0"
        )
    if chosen.destroyed:
        raise CommError(
            f"{operator} in {chosen}, whose process group was destroyed; make another by "
            "comm.group() after init_process_group()"
        )
    return chosen
