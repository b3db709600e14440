"""Buffers (the running statistics of batch norm) kept in step: all ranks follow the first one.

[Note: When buffers travel]
DistributedDataParallel broadcasts the buffers of rank 0 before each forward, and every rank waits.
The forward just done was the last to change them, so here they are copied when backward starts,
travel beside it, and are written back when it ends: the next forward sees the same values, and
nobody waits. What a recomputed forward (activation checkpointing) adds to them a second time during
backward is thereby dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from slipstream.transport import broadcast


class Buffers:
    """``stage`` before backward, ``start`` beside it, ``restore`` after it. Exactness: bitwise."""

    def __init__(self, current: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._current = current
        self._staged = torch.empty(0)
        self.num_bytes = sum(b.nbytes for b in current())
        """Bytes that a broadcast of all buffers carries."""

    def __bool__(self) -> bool:
        return self.num_bytes > 0

    def stage(self) -> None:
        """Copy the values as they are now."""
        self._staged = broadcast.pack_bytes(self._tensors())

    def start(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """Begin to replace the copy by that of the group's first rank."""
        work = dist.broadcast(self._staged, group=group, group_src=0, async_op=True)
        return [work] if work is not None else []

    def restore(self) -> None:
        """Write the copy back into the buffers."""
        broadcast.unpack_bytes(self._staged, self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        """Those of this moment: a forward may put new tensors in the place of the old."""
        return [b for b in self._current() if b.nbytes]
