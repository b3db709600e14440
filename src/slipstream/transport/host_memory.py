"""Memory that the ranks of a host share: slots, in each of them a row a rank.

[Note: Nothing to leave behind]
The memory is a file without a name (``memfd_create``) that is handed through the sockets. The
kernel drops it with the last process. Nor does it count against the size of ``/dev/shm``, which is
64 MB in most containers.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from slipstream.errors import ClusterError
from slipstream.transport.consistency import agree
from slipstream.transport.host_shares import Cut
from slipstream.transport.hosts import Hosts

PIECE = 2**20
"""Bytes of each share that pass through a slot at a time."""
MOST = 2**22
"""Bytes of all shares that do: a host with many ranks needs twice that for each of them."""
SLOTS = 2
"""Chunks under way."""


class HostMemory:
    """Memory of the ranks of a host: slots of rows of as many bytes as a chunk, one row a rank.

    Args:
        memory: all its bytes.
        rows: in a slot.
        chunk: bytes of a row.
    """

    def __init__(self, memory: torch.Tensor, rows: int, chunk: int) -> None:
        self.chunk = chunk
        self._rows = memory.view(-1, rows, chunk)
        self._blocks: dict[tuple[torch.dtype, int, int], list[list[list[torch.Tensor]]]] = {}

    @property
    def slots(self) -> int:
        """Chunks that fit in."""
        return len(self._rows)

    def free(self) -> None:
        """Give the memory back, once nobody uses a block of it any more."""
        self._rows = self._rows[:0].clone()
        self._blocks.clear()

    def blocks(self, cut: Cut) -> list[list[list[torch.Tensor]]]:
        """The place of every piece of a chunk, by slot, row and owner."""
        owners, dtype = len(cut.shares), cut.flat.dtype
        key = dtype, owners, cut.width
        if key not in self._blocks:
            values = self._rows.view(dtype)[..., : owners * cut.width]
            places = values.unflatten(-1, (owners, cut.width))
            self._blocks[key] = [[list(row) for row in slot] for slot in places]
        return self._blocks[key]


def share_memory(
    hosts: Hosts, owners: int, lines: Sequence[int], rows: Sequence[int], group: dist.ProcessGroup
) -> list[HostMemory]:
    """Memory for each of ``lines``, the same in all ranks of a host. Collective.

    Args:
        hosts: where the ranks are.
        owners: of the shares of a tensor.
        lines: numbers of lines of ``hosts``; each gets its own.
        rows: of a slot, by line.
        group: of all ranks.

    Raises:
        ClusterError: the kernel gives no memory; on the rank that asked for it.
        MismatchError: the same, on all others.
    """
    chunk = min(PIECE * owners, MOST)
    sizes = [SLOTS * count * chunk for count in rows]
    files: list[int] = []
    error: Exception | None = None
    first = hosts.neighbours[0]
    if hosts.rank == first and len(hosts.neighbours) > 1:
        try:
            files += [_reserve(size) for size in sizes]
        except OSError as failure:
            error = ClusterError(
                f"rank {hosts.rank} cannot reserve {sum(sizes) / 2**20:.1f} MB of memory to share "
                f"with ranks {list(hosts.neighbours[1:])} of its host ({failure.strerror}); allow "
                "this process and its container more memory, or write gradients: {transport: "
                "direct}, which needs none"
            )
    try:
        agree({}, group, error)
        memories = []
        for number, (line, size, count) in enumerate(zip(lines, sizes, rows, strict=True)):
            sockets = hosts.lines[line]
            if hosts.rank == first:
                for peer in sockets.values():
                    socket.send_fds(peer, [b"m"], [files[number]])
            else:
                files += socket.recv_fds(sockets[first], 1, 1)[1]
            mapped = mmap.mmap(files[number], size) if sockets else bytearray(size)
            memories.append(HostMemory(torch.frombuffer(mapped, dtype=torch.uint8), count, chunk))
        return memories
    finally:
        for file in files:
            os.close(file)


def _reserve(size: int) -> int:
    """A file of memory without a name, all of it there: writing to it later cannot fail."""
    file = os.memfd_create("slipstream")
    try:
        os.posix_fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        raise
    return file
