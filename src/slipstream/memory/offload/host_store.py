"""Keep tensors of a GPU in pinned host memory, copied on side streams.

[Note: Streams]
Copies out run on one side stream, copies back on another, so that the directions do not wait for
each other. GPU memory is always allocated on the compute stream, because the allocator reuses what
is freed on a stream for that stream only. Both directions need two orders:

- out: the side stream waits for the compute stream, which has just written the tensor. The tensor
  is held until ``settle`` has made the compute stream wait for the copy, as its memory is reused
  from then on.
- back: the side stream waits for the compute stream, which may still use the memory that the copy
  will fill. The compute stream waits for the copy before it reads the memory, or frees it unread.

The compute stream is looked up before a side stream is entered: inside ``torch.cuda.stream(side)``
the current stream is ``side``, which would then wait for itself.

torch gives the CPU streams that do nothing, so the same code runs there: tests hold it to the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload.slots import Slot
from slipstream.memory.offload.store import TensorStore, Traffic

_MAX_PENDING_WAITS = 256


@dataclass(eq=False, slots=True)
class _Ticket:
    """One tensor on its way out, in host memory, or on its way back."""

    slot: Slot
    host: torch.Tensor
    compute: torch.cuda.Stream  # owns the memory of the source
    copied: torch.cuda.Event | None  # None on a CPU
    source: torch.Tensor | None  # until settled
    target: torch.Tensor | None = None
    reader: torch.cuda.Stream | None = None  # owns the memory of the target
    arrived: torch.cuda.Event | None = None


class HostStore(TensorStore):
    """Slabs of pinned host memory, reused from step to step, and two side streams.

    No method but ``close`` blocks the host. See [Note: Streams].

    Args:
        device: the GPU; on a CPU nothing is gained, and copies block.
        budget_bytes: limit of the host memory.
        rank: of this process, for error messages.

    Raises:
        OffloadError: the budget or host memory is exhausted; names the rank and the block whose
            activation it was.
    """

    def __init__(self, device: torch.device, budget_bytes: int, rank: int = 0) -> None:
        super().__init__(2**28, budget_bytes, rank)
        self._device, self._runtime = device, torch.get_device_module(device)
        self._out, self._back = self._runtime.Stream(device), self._runtime.Stream(device)
        self._slabs: list[torch.Tensor] = []
        # Events before and after each wait of the compute stream, not yet added to the traffic.
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def traffic(self) -> Traffic:
        """Bytes copied so far, and the seconds for which the compute stream stood still."""
        self._add_up_waits()
        return self._traffic

    def put(self, raw: torch.Tensor, what: str) -> _Ticket:
        """Copy out on a side stream, after what the current stream computes."""
        self._reclaim()
        compute = self._runtime.current_stream(self._device)
        try:
            slot = self._slots.take(raw.nbytes)
        except (RuntimeError, MemoryError) as error:
            raise OffloadError(
                f"rank {self._rank}: memory.offload has no host memory left for an activation of "
                f"{what}: {error}; offload less (a smaller batch, a larger keep_last, fewer "
                "modules), or {to: disk}"
            ) from error
        host = self._slabs[slot.slab].narrow(0, slot.offset, raw.nbytes)
        self._out.wait_stream(compute)
        self._out.wait_stream(self._back)  # the slot's last tensor may still be on its way back
        with self._runtime.stream(self._out):
            host.copy_(raw, non_blocking=True)
        self._traffic.bytes_out += raw.nbytes
        return _Ticket(slot, host, compute, self._out.record_event(), raw)

    def settle(self, ticket: _Ticket) -> None:
        """Make the compute stream wait for the copy; it may overwrite the source after that."""
        if ticket.source is not None:
            self._order(ticket.compute, ticket.copied)
            ticket.source = None

    def fetch(self, ticket: _Ticket) -> None:
        """Copy back on a side stream, after what the current stream computes."""
        if ticket.source is not None or ticket.target is not None:
            return
        compute = self._runtime.current_stream(self._device)
        ticket.target = torch.empty_like(ticket.host, device=self._device)
        ticket.reader = compute
        self._back.wait_stream(compute)
        self._back.wait_event(ticket.copied)
        with self._runtime.stream(self._back):
            ticket.target.copy_(ticket.host, non_blocking=True)
        ticket.arrived = self._back.record_event()
        self._traffic.bytes_back += ticket.target.nbytes

    def take(self, ticket: _Ticket) -> torch.Tensor:
        """The bytes; the current stream waits for them."""
        if ticket.source is not None:
            return ticket.source
        self.fetch(ticket)
        assert ticket.target is not None
        current = self._runtime.current_stream(self._device)
        self._order(current, ticket.arrived)
        if current != ticket.reader:
            ticket.target.record_stream(current)
        target, ticket.target = ticket.target, None
        return target

    def close(self) -> None:
        """Wait for copies on their way and free the memory."""
        self._reclaim()
        self._runtime.synchronize(self._device)
        self._add_up_waits()
        self._slabs.clear()

    def _add_slab(self, num_bytes: int) -> None:
        pinned = self._device.type != "cpu"
        self._slabs.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def _reclaim(self) -> None:
        """Free slots and device memory of dropped tickets, after the copies that use them."""
        while self._dropped:
            ticket = self._dropped.popleft()
            self.settle(ticket)
            if ticket.target is not None:
                assert ticket.reader is not None
                ticket.reader.wait_event(ticket.arrived)
                ticket.target = None
            self._slots.give_back(ticket.slot)

    def _order(self, stream: torch.cuda.Stream, event: torch.cuda.Event | None) -> None:
        """Make the stream wait for the event, and time the wait."""
        if event is None or event.query():
            return  # it has happened already
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))
        if len(self._waits) > _MAX_PENDING_WAITS:
            self._add_up_waits()

    def _add_up_waits(self) -> None:
        """Add the waits that the GPU has completed to the traffic."""
        waits, self._waits = self._waits, []
        for before, after in waits:
            if after.query():
                self._traffic.seconds_waited += before.elapsed_time(after) / 1e3
            else:
                self._waits.append((before, after))
