"""Keeps buffers (the running statistics of batch norm) equal to those of the first rank.

[Note: When buffers travel]
DistributedDataParallel broadcasts the buffers of rank 0 before each forward, and every rank waits.
The last forward was the last to change them, so here they are copied when backward begins, travel
beside it, and are written back after the update: until then another backward may need the graph
that has saved them. The next forward sees the same values, and nobody waits. What a recomputed
forward (activation checkpointing) adds to them a second time during backward is thereby dropped;
what a forward between backward and update changes stays, and travels with the next backward. On a
CPU that is told by the values, as batch normalisation does not count its changes; a device would
have to be waited for, so there what counts them stays alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from slipstream.errors import UsageError
from slipstream.transport.broadcast import pack_bytes, unpack_bytes
from slipstream.transport.requests import Broadcast

Shape = tuple[str, torch.dtype, torch.Size]


class Buffers:
    """``stage`` before backward, carry out the request beside it, ``arrived`` when it has ended,
    ``restore`` after the update.

    Args:
        current: names and values; read anew each time, as a forward may replace a buffer.

    Exactness: bitwise.
    """

    def __init__(self, current: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._current = current
        self._shapes = [(name, b.dtype, b.shape) for name, b in current() if b.nbytes]
        self._staged = torch.empty(0)
        self._arrived: list[tuple[torch.Tensor, int]] = []
        self._before = torch.empty(0)  # their bytes then, on a CPU
        self._left = [(b, _version(b)) for _, b in current() if b.nbytes]  # as last left here
        self.num_bytes = sum(b.nbytes for _, b in current())
        """Bytes that a broadcast of all buffers carries."""
        self.alike = True
        """Whether all are as the last broadcast has left them; else a forward has changed some
        since, on each rank in its own way, and they travel with its backward."""

    def __bool__(self) -> bool:
        return self.num_bytes > 0

    def stage(self) -> Broadcast:
        """Copy the present values; the request replaces the copy by that of the first rank.

        Raises:
            UsageError: their sizes are not those that the ranks compared at the start; values of
                other sizes would shift all behind them.
        """
        named = [(name, b) for name, b in self._current() if b.nbytes]
        shapes = [(name, b.dtype, b.shape) for name, b in named]
        if shapes != self._shapes:
            raise _changed(self._shapes, shapes)
        self._staged = pack_bytes([b for _, b in named])
        return Broadcast(self._staged)

    def arrived(self) -> None:
        """The copy holds the first rank's values, and backward has ended."""
        self._arrived = [(b, _version(b)) for _, b in self._current() if b.nbytes]
        if self._staged.device.type == "cpu":
            self._before = pack_bytes([b for b, _ in self._arrived])

    def restore(self) -> None:
        """Write the copy into the buffers that did not change since it arrived; where forward does
        not count its changes, as batch normalisation, nor is this counted: a graph that has saved
        the buffer, and waits for its backward meanwhile, does not look at it."""
        if not self._arrived:
            return
        sizes = [b.nbytes for b, _ in self._arrived]
        parts, changed = self._staged.split(sizes), self._changed(sizes)
        self.alike = not any(changed)
        rows = zip(self._arrived, parts, changed, self._left, strict=True)
        for (buffer, version), part, differs, (former, before) in rows:
            uncounted = buffer is former and version == before
            if not differs:
                unpack_bytes(part, [buffer.data if uncounted else buffer])
        self._left = [(buffer, _version(buffer)) for buffer, _ in self._arrived]
        self._arrived = []

    def _changed(self, sizes: Sequence[int]) -> list[bool]:
        """Whether each has changed since it arrived."""
        counted = [_version(buffer) != version for buffer, version in self._arrived]
        if self._staged.device.type != "cpu":
            return counted
        now = pack_bytes([buffer for buffer, _ in self._arrived])
        if torch.equal(now, self._before):
            return counted
        pairs = zip(now.split(sizes), self._before.split(sizes), strict=True)
        return [not torch.equal(a, b) or c for (a, b), c in zip(pairs, counted, strict=True)]

    def forget(self) -> None:
        """The next forward has begun: the present values travel with its backward."""
        self.alike, self._arrived = self.alike and not self._arrived, []


def _version(buffer: torch.Tensor) -> int:
    """Counts changes; a tensor made in inference mode does not count them."""
    return 0 if buffer.is_inference() else buffer._version


def _changed(before: Sequence[Shape], now: Sequence[Shape]) -> UsageError:
    then, by_name = {n: (d, s) for n, d, s in before}, {n: (d, s) for n, d, s in now}
    name = next(n for n in {**then, **by_name} if then.get(n) != by_name.get(n))
    described = [
        "absent" if value is None else f"{value[0]} {tuple(value[1])}"
        for value in (then.get(name), by_name.get(name))
    ]
    return UsageError(
        f"buffer {name} was {described[0]} at accelerate() and is {described[1]} now; buffers are "
        "those of the first rank on every rank, so their sizes must stay: keep what grows in a "
        "plain attribute of the module, or accelerate() again after the change"
    )
