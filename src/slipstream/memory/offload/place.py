"""The store that a strategy names, on this machine."""

from __future__ import annotations

import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload.disk_store import DiskStore
from slipstream.memory.offload.free_space import RESERVE, free_disk_bytes, free_host_bytes, share
from slipstream.memory.offload.host_store import HostStore
from slipstream.strategy import Offload

LEAST_BYTES = 2**28
"""Room that a rank must have to begin: a slab of pinned memory."""


def open_store(
    config: Offload, device: torch.device, local_ranks: int = 1, rank: int = 0
) -> HostStore | DiskStore:
    """A store that takes no more than its share of what is free on this host.

    Args:
        wish: where to.
        device: of the tensors.
        local_ranks: processes of this host that open one.
        rank: for errors.

    Raises:
        OffloadError: the place is not there, or has too little room.
    """
    free = free_host_bytes() if config.to == "host" else free_disk_bytes(config.folder)
    budget = share(free, local_ranks)
    if budget < LEAST_BYTES:
        raise OffloadError(
            f"rank {rank}: memory.offload to {config.to}: {free / 2**30:.2f} GiB are free for "
            f"{local_ranks} ranks of this host, with {RESERVE:.0%} left to others; each needs "
            f"{LEAST_BYTES / 2**30:.2f} GiB at least; make room, or offload to another place"
        )
    name = "this rank's share of what is free"
    if config.to == "host":
        return HostStore(device, budget, rank, budget_name=name)
    return DiskStore(config.folder, budget, rank, budget_name=name)
