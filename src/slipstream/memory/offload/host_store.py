"""Tensors of a GPU in pinned host memory, copied beside the computation.

Never decides what goes there.

[Note: Streams]
A copy out runs on one side stream, a copy back on another, so that neither waits for the other's
direction. Memory of the GPU is always that of the stream that computes, as the allocator keeps what
each stream frees for itself alone; so both ways somebody must wait:

- out: the side stream waits for the computation, which has just written the tensor; the tensor is
  held until ``settle`` has made the computation wait for the copy, as its memory is then reused;
- back: the side stream waits for the computation, which may still use the memory that the copy is
  to fill; the computation waits for the copy before it reads, or frees without having read.

The stream that computes is asked for before a side stream becomes the current one: inside
``torch.cuda.stream(side)`` the current stream is ``side``, which would wait for itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload.slots import Slot, Slots
from slipstream.memory.offload.store import Traffic

_UNREAD = 256  # pairs of events after which those that have passed are added up


@dataclass(eq=False, slots=True)
class _Parked:
    """One tensor on its way out, in host memory, or on its way back."""

    slot: Slot
    host: torch.Tensor
    compute: torch.cuda.Stream  # whose memory the source is
    copied: torch.cuda.Event
    source: torch.Tensor | None  # until settled
    target: torch.Tensor | None = None
    reader: torch.cuda.Stream | None = None  # whose memory the target is
    arrived: torch.cuda.Event | None = None


class HostStore:
    """Pinned host memory in slabs, reused from step to step; two side streams.

    Nothing here waits on the host. See [Note: Streams].

    Args:
        device: the GPU.
        budget_bytes: of host memory, which must not be exceeded.
        rank: for errors.
        budget_name: what the budget is, for errors.

    Raises:
        OffloadError: host memory is short; names the rank and whose tensors they are.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        rank: int = 0,
        *,
        budget_name: str = "budget_bytes",
    ) -> None:
        self._device, self._rank = device, rank
        self._budget, self._budget_name = budget_bytes, budget_name
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._slabs: list[torch.Tensor] = []
        self._slots = Slots(self._add_slab)
        self._dropped: deque[_Parked] = deque()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        """What has moved; the time is that for which the computing stream stood still."""
        self._add_up_waits()
        return self._traffic

    @property
    def reserved_bytes(self) -> int:
        """Of pinned memory."""
        return self._slots.reserved_bytes

    def put(self, raw: torch.Tensor, what: str) -> _Parked:
        """Copy out on the side stream, behind what the current one computes."""
        self._reclaim()
        compute = torch.cuda.current_stream(self._device)
        try:
            slot = self._slots.take(raw.nbytes)
        except (RuntimeError, MemoryError) as error:
            raise OffloadError(
                f"rank {self._rank}: memory.offload has no host memory left for an activation of "
                f"{what}: {error}; offload less (a smaller batch, a larger keep_last, fewer "
                "modules), or to disk"
            ) from error
        host = self._slabs[slot.slab].narrow(0, slot.offset, raw.nbytes)
        self._out.wait_stream(compute)
        self._out.wait_stream(self._back)  # the place's last tensor may still be on its way back
        with torch.cuda.stream(self._out):
            host.copy_(raw, non_blocking=True)
        self._traffic.bytes_out += raw.nbytes
        return _Parked(slot, host, compute, self._out.record_event(), raw)

    def settle(self, ticket: _Parked) -> None:
        """Have the computation wait for the copy, whose source it may then overwrite."""
        if ticket.source is not None:
            self._order(ticket.compute, ticket.copied)
            ticket.source = None

    def fetch(self, ticket: _Parked) -> None:
        """Copy back on the side stream, behind what the current one computes."""
        if ticket.source is not None or ticket.target is not None:
            return
        compute = torch.cuda.current_stream(self._device)
        ticket.target = torch.empty_like(ticket.host, device=self._device)
        ticket.reader = compute
        self._back.wait_stream(compute)
        self._back.wait_event(ticket.copied)
        with torch.cuda.stream(self._back):
            ticket.target.copy_(ticket.host, non_blocking=True)
        ticket.arrived = self._back.record_event()
        self._traffic.bytes_back += ticket.target.nbytes

    def take(self, ticket: _Parked) -> torch.Tensor:
        """The bytes, for the current stream, which waits for them."""
        if ticket.source is not None:
            return ticket.source
        self.fetch(ticket)
        assert ticket.target is not None
        assert ticket.arrived is not None
        current = torch.cuda.current_stream(self._device)
        self._order(current, ticket.arrived)
        if current != ticket.reader:
            ticket.target.record_stream(current)
        target, ticket.target = ticket.target, None
        return target

    def drop(self, ticket: _Parked) -> None:
        """Only takes note: the garbage collector may call this inside of anything."""
        self._dropped.append(ticket)

    def close(self) -> None:
        """Wait for copies under way and give the memory back."""
        self._reclaim()
        self._out.synchronize()
        self._back.synchronize()
        self._add_up_waits()
        self._slabs.clear()

    # Inside.

    def _add_slab(self, num_bytes: int) -> None:
        if self.reserved_bytes + num_bytes > self._budget:
            raise MemoryError(
                f"{(self.reserved_bytes + num_bytes) / 2**30:.2f} GiB would be needed, "
                f"{self._budget_name} is {self._budget / 2**30:.2f} GiB"
            )
        self._slabs.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

    def _reclaim(self) -> None:
        """Places and memory of dropped tickets; what is not read yet must not be overwritten."""
        while self._dropped:
            ticket = self._dropped.popleft()
            self.settle(ticket)
            if ticket.target is not None:
                assert ticket.reader is not None
                assert ticket.arrived is not None
                ticket.reader.wait_event(ticket.arrived)
                ticket.target = None
            self._slots.give_back(ticket.slot)

    def _order(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Have the stream wait for the event, between two stamps."""
        if event.query():
            return  # passed: there is nothing to wait for
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))
        if len(self._waits) > _UNREAD:
            self._add_up_waits()

    def _add_up_waits(self) -> None:
        """Of the pairs of stamps that the GPU has passed."""
        waits, self._waits = self._waits, []
        for before, after in waits:
            if after.query():
                self._traffic.seconds_waited += before.elapsed_time(after) / 1e3
            else:
                self._waits.append((before, after))
