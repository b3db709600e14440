"""Tensors spooled to a file: works everywhere, and is how machines without a GPU offload.

Never decides what goes there.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from weakref import WeakMethod, finalize

import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload.slots import Slot, Slots
from slipstream.memory.offload.store import Traffic

SLAB_BYTES = 2**26


@dataclass(eq=False, slots=True)
class _Spooled:
    """One tensor on its way out, in the file, or on its way back."""

    what: str
    slot: Slot
    device: torch.device
    num_bytes: int
    source: torch.Tensor | None  # in memory until it is written
    written: threading.Event = field(default_factory=threading.Event)
    target: torch.Tensor | None = None
    read: threading.Event | None = None
    error: Exception | None = None
    dropped: bool = False


class DiskStore:
    """A spool file without a name, which is gone when it is closed, also by a crash.

    One thread writes and another reads, both beside the computation. What is needed again before it
    is written is taken from memory. Host memory: what is not settled or not taken yet, no more; the
    system may cache the file as it sees fit. Tensors of a GPU are copied to the host first, which
    the training waits for.

    Args:
        folder: where the file lies; None: the system's folder for temporary files.
        budget_bytes: of the file, which must not be exceeded; None: as far as the disk goes.
        rank: for errors.
        budget_name: what the budget is, for errors.

    Raises:
        OffloadError: no file can be made there; later: the disk is full or fails. Names the rank
            and whose tensors they are.

    Example:
        >>> store = DiskStore()
        >>> ticket = store.put(torch.arange(3, dtype=torch.uint8), "a block")
        >>> store.settle(ticket)
        >>> store.take(ticket)
        tensor([0, 1, 2], dtype=torch.uint8)
        >>> store.close()
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        budget_bytes: int | None = None,
        rank: int = 0,
        *,
        budget_name: str = "budget_bytes",
    ) -> None:
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._budget, self._rank, self._budget_name = budget_bytes, rank, budget_name
        try:
            self._file, path = tempfile.mkstemp(prefix="slipstream-", dir=self._folder)
            os.unlink(path)
        except OSError as error:
            raise OffloadError(
                f"rank {rank}: memory.offload cannot write to the folder {self._folder}: "
                f"{error.strerror}; name another: {{to: disk, folder: ...}}"
            ) from error
        self._starts: list[int] = []  # of each slab in the file
        self._slots = Slots(self._add_slab, SLAB_BYTES)
        self._dropped: deque[_Spooled] = deque()
        self._writer = _Worker("slipstream-offload-write", self._write_out)
        self._reader = _Worker("slipstream-offload-read", self._read_back)
        # Also where nobody closes it; the end of the process needs no help.
        self._end = finalize(self, _end, self._file, self._writer, self._reader)
        self._end.atexit = False
        self.traffic = Traffic()

    @property
    def reserved_bytes(self) -> int:
        """The size of the file."""
        return self._slots.reserved_bytes

    def put(self, raw: torch.Tensor, what: str) -> _Spooled:
        """Hand ``raw`` to the writer."""
        self._reclaim()
        try:
            slot = self._slots.take(raw.nbytes)
        except OSError as error:
            raise self._failure(what, "write", error) from error
        ticket = _Spooled(what, slot, raw.device, raw.nbytes, raw.cpu())
        self.traffic.bytes_out += raw.nbytes
        self._writer.submit(ticket)
        return ticket

    def settle(self, ticket: _Spooled) -> None:
        """Wait until it is written."""
        self._wait(ticket.written)
        if ticket.error is not None:
            raise self._failure(ticket.what, "write", ticket.error) from ticket.error

    def fetch(self, ticket: _Spooled) -> None:
        """Have the reader bring it back, unless it is in memory still, or under way."""
        if ticket.source is None and ticket.read is None:
            ticket.target = torch.empty(ticket.num_bytes, dtype=torch.uint8)
            ticket.read = threading.Event()
            self.traffic.bytes_back += ticket.num_bytes
            self._reader.submit(ticket)

    def take(self, ticket: _Spooled) -> torch.Tensor:
        """The bytes, when they are there."""
        source = ticket.source  # once: the writer may forget it at any time
        if source is None:
            self.fetch(ticket)
            assert ticket.read is not None
            self._wait(ticket.read)
            if ticket.error is not None:
                raise self._failure(ticket.what, "read", ticket.error) from ticket.error
            source, ticket.target, ticket.read = ticket.target, None, None
        assert source is not None
        return source.to(ticket.device)

    def drop(self, ticket: _Spooled) -> None:
        """Only takes note: the garbage collector may call this inside of anything."""
        ticket.dropped = True
        self._dropped.append(ticket)

    def close(self) -> None:
        """End the threads and remove the file."""
        self._writer.close()
        self._reader.close()
        self._dropped.clear()
        self._end()

    # Inside.

    def _write(self, buffer: memoryview, position: int) -> None:
        """All of ``buffer`` to the file at ``position``; a test may make it slow or fail."""
        while buffer:
            written = os.pwrite(self._file, buffer, position)
            buffer, position = buffer[written:], position + written

    def _read(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from the file at ``position``."""
        while buffer:
            count = os.preadv(self._file, [buffer], position)
            if not count:
                raise OSError(f"the file ends at byte {position}")
            buffer, position = buffer[count:], position + count

    def _write_out(self, ticket: _Spooled) -> None:
        """In the writer's thread."""
        try:
            if not ticket.dropped:
                assert ticket.source is not None
                self._write(ticket.source.numpy().data, self._position(ticket))
                ticket.source = None
        except Exception as error:  # whatever it is: somebody waits for this thread
            ticket.error = error
        finally:
            ticket.written.set()

    def _read_back(self, ticket: _Spooled) -> None:
        """In the reader's thread."""
        assert ticket.read is not None
        assert ticket.target is not None
        done = ticket.read
        try:
            if not ticket.dropped:
                self._read(ticket.target.numpy().data, self._position(ticket))
        except Exception as error:
            ticket.error = error
        finally:
            done.set()

    def _position(self, ticket: _Spooled) -> int:
        return self._starts[ticket.slot.slab] + ticket.slot.offset

    def _add_slab(self, num_bytes: int) -> None:
        """Make the file longer, on the disk: that it is full is found out here."""
        start = self._slots.reserved_bytes
        if self._budget is not None and start + num_bytes > self._budget:
            raise OSError(
                f"{(start + num_bytes) / 2**30:.2f} GiB would be needed, {self._budget_name} is "
                f"{self._budget / 2**30:.2f} GiB"
            )
        os.posix_fallocate(self._file, start, num_bytes)
        self._starts.append(start)

    def _reclaim(self) -> None:
        """Places of dropped tickets that no thread is busy with."""
        for _ in range(len(self._dropped)):
            ticket = self._dropped.popleft()
            if ticket.written.is_set() and (ticket.read is None or ticket.read.is_set()):
                self._slots.give_back(ticket.slot)
            else:
                self._dropped.append(ticket)

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            start = time.perf_counter()
            event.wait()
            self.traffic.seconds_waited += time.perf_counter() - start

    def _failure(self, what: str, verb: str, error: Exception) -> OffloadError:
        reserved = self.reserved_bytes / 2**30
        reason = getattr(error, "strerror", None) or error
        return OffloadError(
            f"rank {self._rank}: memory.offload cannot {verb} an activation of {what} "
            f"{'from' if verb == 'read' else 'to'} {self._folder}: {reason} (the "
            f"file takes {reserved:.2f} GiB); make room there, name another folder, or offload "
            "less (a smaller batch, a larger keep_last, fewer modules)"
        )


class _Worker:
    """One daemon thread that does one thing to tickets, in the order in which they come."""

    def __init__(self, name: str, work: Callable[[_Spooled], None]) -> None:
        self._queue: SimpleQueue[_Spooled | None] = SimpleQueue()
        job = self._queue, WeakMethod(work)
        self._thread = threading.Thread(target=_serve, args=job, name=name, daemon=True)
        self._thread.start()

    def submit(self, ticket: _Spooled) -> None:
        self._queue.put(ticket)

    def end(self) -> None:
        """As soon as all is done; may be called by the garbage collector."""
        self._queue.put(None)

    def close(self) -> None:
        """Once all is done."""
        self.end()
        self._thread.join()


def _serve(queue: SimpleQueue[_Spooled | None], work: WeakMethod[Callable[..., None]]) -> None:
    """In a thread, which keeps neither a tensor nor its store alive while it rests."""
    while (ticket := queue.get()) is not None:
        if (do := work()) is not None:
            do(ticket)
        del ticket, do


def _end(file: int, *workers: _Worker) -> None:
    """The store is gone, and so is whoever could wait for it."""
    for worker in workers:
        worker.end()
    os.close(file)
