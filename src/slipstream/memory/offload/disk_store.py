"""Keep tensors in a spool file: works on any machine, also without a GPU."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import finalize

import torch

from slipstream.errors import OffloadError
from slipstream.memory.offload.slots import Slot
from slipstream.memory.offload.store import TensorStore

T = TypeVar("T")

SLAB_BYTES = 2**26


@dataclass(eq=False, slots=True)
class _Ticket:
    """One tensor on its way out, in the file, or on its way back."""

    what: str
    slot: Slot
    device: torch.device
    num_bytes: int
    source: torch.Tensor | None  # in memory until it is written
    written: Future[None] | None = None
    read: Future[torch.Tensor] | None = None
    dropped: bool = False


class DiskStore(TensorStore):
    """An unlinked spool file, which disappears when it is closed, also in a crash.

    One thread writes and one reads, both beside the computation. A tensor that is needed before it
    is written is taken from memory. Host memory holds only what is not settled or not taken yet;
    the system may cache the file as it sees fit. Tensors of a GPU are copied to the host first,
    and training waits for that copy.

    Args:
        folder: of the file; None: the system's folder for temporary files.
        budget_bytes: limit of the file's size; None: the size of the disk.
        rank: of this process, for error messages.

    Raises:
        OffloadError: no file can be created in the folder; later: the disk is full or fails. Names
            the rank and the block whose activation it was.

    Example:
        >>> store = DiskStore()
        >>> ticket = store.put(torch.arange(3, dtype=torch.uint8), "a block")
        >>> store.settle(ticket)
        >>> store.take(ticket)
        tensor([0, 1, 2], dtype=torch.uint8)
        >>> store.close()
    """

    def __init__(
        self, folder: str | Path | None = None, budget_bytes: int | None = None, rank: int = 0
    ) -> None:
        super().__init__(SLAB_BYTES, budget_bytes, rank)
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            self._file, path = tempfile.mkstemp(prefix="slipstream-", dir=self._folder)
            os.unlink(path)
        except OSError as error:
            raise OffloadError(
                f"rank {rank}: memory.offload cannot write to the folder {self._folder}: "
                f"{error.strerror}; name another folder: {{to: disk, folder: ...}}"
            ) from error
        self._slab_starts: list[int] = []  # positions in the file
        # Work that is queued holds the store; an executor ends its thread when it is collected.
        self._writer = ThreadPoolExecutor(1, "slipstream-offload-write")
        self._reader = ThreadPoolExecutor(1, "slipstream-offload-read")
        self._close_file = finalize(self, os.close, self._file)

    def put(self, raw: torch.Tensor, what: str) -> _Ticket:
        """Queue ``raw`` for the writer."""
        self._reclaim()
        try:
            slot = self._slots.take(raw.nbytes)
        except (OSError, MemoryError) as error:
            raise self._failure(what, "write", error) from error
        ticket = _Ticket(what, slot, raw.device, raw.nbytes, raw.cpu())
        self._traffic.bytes_out += raw.nbytes
        ticket.written = self._writer.submit(self._write_out, ticket)
        return ticket

    def settle(self, ticket: _Ticket) -> None:
        """Wait until the bytes are written."""
        assert ticket.written is not None
        self._wait(ticket, "write", ticket.written)

    def fetch(self, ticket: _Ticket) -> None:
        """Queue the ticket for the reader, unless its bytes are in memory or on their way."""
        if ticket.source is None and ticket.read is None:
            self._traffic.bytes_back += ticket.num_bytes
            ticket.read = self._reader.submit(self._read_back, ticket)

    def take(self, ticket: _Ticket) -> torch.Tensor:
        """The bytes; waits until they are read."""
        source = ticket.source  # read once: the writer's thread sets it to None at any time
        if source is None:
            self.fetch(ticket)
            assert ticket.read is not None
            source = self._wait(ticket, "read", ticket.read)
            ticket.read = None
        return source.to(ticket.device)

    def drop(self, ticket: _Ticket) -> None:
        """Threads skip what is left to do for the ticket."""
        ticket.dropped = True
        super().drop(ticket)

    def close(self) -> None:
        """End the threads and remove the file."""
        self._writer.shutdown()
        self._reader.shutdown()
        self._dropped.clear()
        self._close_file()

    def _write(self, buffer: memoryview, position: int) -> None:
        """Write all of ``buffer`` to the file at ``position``; tests make it slow."""
        while buffer:
            written = os.pwrite(self._file, buffer, position)
            buffer, position = buffer[written:], position + written

    def _read(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` from the file at ``position``; tests make it slow."""
        while buffer:
            count = os.preadv(self._file, [buffer], position)
            if not count:
                raise OSError(f"the file ends at byte {position}")
            buffer, position = buffer[count:], position + count

    def _write_out(self, ticket: _Ticket) -> None:
        """Put bytes into the file, in the writer's thread."""
        if not ticket.dropped:
            assert ticket.source is not None
            self._write(ticket.source.numpy().data, self._position(ticket))
            ticket.source = None

    def _read_back(self, ticket: _Ticket) -> torch.Tensor:
        """Get bytes back, in the reader's thread."""
        target = torch.empty(ticket.num_bytes, dtype=torch.uint8)
        if not ticket.dropped:
            self._read(target.numpy().data, self._position(ticket))
        return target

    def _position(self, ticket: _Ticket) -> int:
        return self._slab_starts[ticket.slot.slab] + ticket.slot.offset

    def _add_slab(self, num_bytes: int) -> None:
        """Extend the file. Its blocks are allocated now, so that a full disk is noticed here."""
        start = self._slots.reserved_bytes
        os.posix_fallocate(self._file, start, num_bytes)
        self._slab_starts.append(start)

    def _reclaim(self) -> None:
        """Free the slots of dropped tickets that no thread works on."""
        for _ in range(len(self._dropped)):
            ticket = self._dropped.popleft()
            if all(work is None or work.done() for work in (ticket.written, ticket.read)):
                self._slots.give_back(ticket.slot)
            else:
                self._dropped.append(ticket)

    def _wait(self, ticket: _Ticket, verb: str, work: Future[T]) -> T:
        """Wait for a thread; raise its error as an OffloadError."""
        start, waits = time.perf_counter(), not work.done()
        try:
            return work.result()
        except Exception as error:
            raise self._failure(ticket.what, verb, error) from error
        finally:
            if waits:
                self._traffic.seconds_waited += time.perf_counter() - start

    def _failure(self, what: str, verb: str, error: Exception) -> OffloadError:
        reserved = self.reserved_bytes / 2**30
        reason = getattr(error, "strerror", None) or error
        return OffloadError(
            f"rank {self._rank}: memory.offload cannot {verb} an activation of {what} "
            f"{'from' if verb == 'read' else 'to'} {self._folder}: {reason} (the file occupies "
            f"{reserved:.2f} GiB); free some disk space, name another folder, or offload less "
            "(a smaller batch, a larger keep_last, fewer modules)"
        )
