"""Groups of ranks whose order counts: the first is the root, chunk ``i`` belongs to the ``i``-th.

torch sorts the ranks of a process group; here ``group([2, 0])`` is rank 2 before rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from slipstream.errors import CommError
from slipstream.trace.recorder import Recorder


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that move tensors together, in an order of their own; made by `group`.

    Attributes:
        ranks: of the world, in the group's order.
        process_group: None on a rank outside, and where one process trains alone.
        check: whether its members compare notes before every operator, see `group`.
        rank: place of this process in ``ranks``; -1 outside.
        recorder: gets a span of each operator, forward and backward; None: nobody does.
    """

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None
    check: bool
    rank: int
    recorder: Recorder | None = None

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    @property
    def consults(self) -> bool:
        """Whether its members compare notes: it has ``check``, and more than one."""
        return self.check and len(self.ranks) > 1

    @property
    def members(self) -> dist.ProcessGroup:
        """The process group, of which this rank is a member and not the only one."""
        assert self.process_group is not None
        return self.process_group

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where torch has the group's ranks, in the group's order, in its process group."""
        place = {rank: place for place, rank in enumerate(sorted(self.ranks))}
        return tuple(place[rank] for rank in self.ranks)

    @cached_property
    def in_order(self) -> bool:
        """Whether torch has the ranks in the group's order."""
        return self.places == tuple(range(self.size))

    @cached_property
    def device(self) -> torch.device:
        """Where its ranks talk to each other: the CPU, unless the group has NCCL alone."""
        alone = self.process_group is None
        on_cpu = alone or "gloo" in dist.get_backend_config(self.process_group)
        return torch.device("cpu" if on_cpu else "cuda")

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
    """A group of ``ranks`` of the world, in this order; None means all of them.

    Every rank of the world makes the same groups in the same order, also those that it is not in.
    Where one process trains alone, the world is rank 0, and every operator the identity.

    Args:
        ranks: the first is the root: it holds what is gathered or reduced, scattered or broadcast.
        check: before data moves, the members compare operator, shapes and dtypes (one collective
            of 160 bytes a rank), so that a mistake is an error on all of them; and in backward each
            says whether it has a gradient, so that a rank that does not use what it got holds
            nobody up. Without it, all must bring the same and use what they get.
        timeout: how long an operator waits for the others (None: as the world's).
        backend: None: that of the world.
        recorder: see `Group`.

    Raises:
        CommError: a rank twice, none at all, or one that the world does not have.

    Example:
        >>> group([0]).ranks, group().size
        ((0,), 1)
    """
    alone = not (dist.is_available() and dist.is_initialized())
    world_size = 1 if alone else dist.get_world_size()
    wanted = tuple(range(world_size)) if ranks is None else tuple(ranks)
    odd = [rank for rank in wanted if not 0 <= rank < world_size]
    if odd or not wanted or len(set(wanted)) < len(wanted):
        raise CommError(
            f"a group of ranks {list(wanted)}; allowed: one or more of the {world_size} ranks "
            f"0 .. {world_size - 1}, each of them once"
        )
    if alone:
        return Group(wanted, None, check, 0, recorder)
    made = dist.new_group(sorted(wanted), timeout=timeout, backend=backend)
    inside = dist.get_rank() in wanted
    return Group(
        wanted,
        made if isinstance(made, dist.ProcessGroup) and inside else None,
        check,
        wanted.index(dist.get_rank()) if inside else -1,
        recorder,
    )


def group_of(
    process_group: dist.ProcessGroup, *, check: bool = True, recorder: Recorder | None = None
) -> Group:
    """A process group that there is already, e.g. of a dimension of a ``DeviceMesh``."""
    ranks = tuple(dist.get_process_group_ranks(process_group))
    return Group(ranks, process_group, check, dist.get_rank(process_group), recorder)


def member(chosen: Group | None, operator: str) -> Group:
    """The group that an operator runs in: ``chosen``, or the world.

    Raises:
        CommError: this rank is not in it.
    """
    if chosen is None:
        world = dist.group.WORLD if dist.is_available() else None
        return Group((0,), None, True, 0) if world is None else group_of(world)
    if chosen.rank < 0:
        raise CommError(
            f"{operator} in {chosen} on rank {dist.get_rank()}, which is not in that group; call "
            "it on the group's ranks only: if group.rank >= 0"
        )
    return chosen
