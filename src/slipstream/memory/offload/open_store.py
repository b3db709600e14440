"""Open the store that a strategy names, within this rank's share of the free space."""

from __future__ import annotations

import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload.disk_store import DiskStore
from slipstream.memory.offload.free_space import RESERVE, free_disk_bytes, free_host_bytes, share
from slipstream.memory.offload.host_store import HostStore
from slipstream.strategy import OffloadConfig

MIN_BYTES = 2**28
"""Least space of a rank: one slab of pinned memory."""


def open_store(
    config: OffloadConfig, device: torch.device, local_ranks: int = 1, rank: int = 0
) -> HostStore | DiskStore:
    """Open a store that takes no more than its share of what is free on this host.

    Args:
        config: names the host or the disk.
        device: of the tensors.
        local_ranks: number of processes of this host that open a store.
        rank: of this process, for error messages.

    Raises:
        OffloadError: the folder does not exist, or there is too little space.
    """
    free = free_host_bytes() if config.to == "host" else free_disk_bytes(config.folder)
    budget = share(free, local_ranks)
    if budget < MIN_BYTES:
        raise OffloadError(
            f"rank {rank}: memory.offload to {config.to}: {free / 2**30:.2f} GiB are free for "
            f"{local_ranks} ranks of this host, of which {RESERVE:.0%} stays free; each rank needs "
            f"at least {MIN_BYTES / 2**30:.2f} GiB; free some space, or offload to another place"
        )
    if config.to == "host":
        return HostStore(device, budget, rank)
    return DiskStore(config.folder, budget, rank)
