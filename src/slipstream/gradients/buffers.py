"""Keeps buffers (the running statistics of batch norm) equal to those of the first rank.

[Note: When buffers travel]
DistributedDataParallel broadcasts the buffers of rank 0 before each forward, and every rank waits.
The last forward was the last to change them, so here they are copied when backward begins, travel
beside it, and are written back when it ends. The next forward sees the same values, and nobody
waits. What a recomputed forward (activation checkpointing) adds to them a second time during
backward is thereby dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from slipstream.transport.broadcast import pack_bytes, unpack_bytes
from slipstream.transport.requests import Broadcast


class Buffers:
    """``stage`` before backward, carry out the request beside it, ``restore`` after it.

    Exactness: bitwise.
    """

    def __init__(self, current: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._current = current
        self._staged = torch.empty(0)
        self.num_bytes = sum(b.nbytes for b in current())
        """Bytes that a broadcast of all buffers carries."""

    def __bool__(self) -> bool:
        return self.num_bytes > 0

    def stage(self) -> Broadcast:
        """Copy the present values; the request replaces the copy by that of the first rank."""
        self._staged = pack_bytes(self._tensors())
        return Broadcast(self._staged)

    def restore(self) -> None:
        """Write the copy back into the buffers."""
        unpack_bytes(self._staged, self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        """Read anew each time, as a forward may replace a buffer by another tensor."""
        return [b for b in self._current() if b.nbytes]
