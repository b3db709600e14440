"""Process groups beside the script's own: each waits for a silent rank as long as the group does
that it stands in for, where torch would wait for half an hour, whatever the script has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Read how long a group waits for a silent rank; of its backends the shortest."""
    # torch tells a group's timeout nowhere else (2.15), and of MPI's groups not at all.
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    known = [backend.options for backend in backends if getattr(backend, "options", None)]
    return min((options._timeout for options in known), default=default_pg_timeout)


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    like: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    members_alone: bool = False,
) -> dist.ProcessGroup | None:
    """``dist.new_group``; None on a rank outside. All groups that slipstream makes come from here.

    Args:
        ranks: of the world, in the order of the new group's; None: all of them.
        like: has the timeout of the new group, unless that is given (None: the world).
        timeout: None: that of ``like``.
        backend: None: that of the world.
        members_alone: whether only the ranks inside call this, not all of the world.
    """
    ordered: dict[str, Any] = {}
    # torch sorts ranks otherwise, and before 2.12 always; its own groups are sorted then, too.
    if ranks is not None and "sort_ranks" in signature(dist.new_group).parameters:
        ordered["sort_ranks"] = False
    group = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout or timeout_of(like or dist.distributed_c10d._get_default_group()),
        backend=backend,
        use_local_synchronization=members_alone,
        **ordered,
    )
    return group if isinstance(group, dist.ProcessGroup) else None  # torch marks ranks outside
