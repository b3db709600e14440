"""Ranks of one host sum tensors in memory that they share.

[Note: One chunk]
Every tensor is cut into shares, one a rank, and these into chunks that fit into a core's cache. Of
each chunk a rank (1) copies the others' shares into its row of the shared memory, (2) adds the rows
of its own share in rank order, (3) copies the others' sums back. A few chunks are under way, each
in a slot of its own, so no rank waits for a slower one at each of them, and the memory is small
however large the tensors: it stays in the caches.

Two ranks have it simpler: each copies whole chunks into its row, and adds the other's row to its
tensor. As many bytes move, and nobody waits a second time.

[Note: Order and waiting]
A rank tells its neighbours by a byte through a socket that it has ended a stage of a chunk, and a
rank that needs the byte sleeps until it is there. So nobody spins, and a rank that dies closes its
sockets, which wakes all who wait for it. The sockets also order the accesses to the memory: what a
rank wrote before it sent is seen by who has received, on any machine, as the kernel's queues demand
it. No flag in the memory is ever read.

[Note: Nothing to leave behind]
The memory is a file without a name (``memfd_create``) that is handed through the sockets. The
kernel drops it with the last process. Nor does it count against the size of ``/dev/shm``, which is
64 MB in most containers.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from slipstream.errors import ClusterError
from slipstream.strategy import Flat, SharedMemory
from slipstream.transport.consistency import agree
from slipstream.transport.direct import add_in_order
from slipstream.transport.flat import FlatTransport
from slipstream.transport.hosts import Hosts, find_hosts, timeout_of
from slipstream.transport.requests import AllReduce, Request
from slipstream.transport.work import ThreadWork, Work

PIECE = 2**20
"""Bytes of each share that pass through a slot at a time."""
MOST = 2**22
"""Bytes of all shares that do: a host with many ranks needs twice that for each of them."""
SLOTS = 2
"""Chunks under way."""
ALIGNMENT = 64
"""Bytes; pieces begin at multiples of it, as vectorized sums like."""

_BYE = 255

Stage = Callable[[int, int], None]
"""What a rank does with a chunk before the others may go on; gets its slot and its index."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor cut into shares, one an owner, and these into chunks.

    Example:
        >>> Cut.of(torch.arange(40), 2, 256).piece(1, 0)
        tensor([24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39])
    """

    flat: torch.Tensor
    shares: Sequence[torch.Tensor]
    width: int  # elements of a piece: a chunk's part of a share
    num_chunks: int

    @classmethod
    def of(cls, tensor: torch.Tensor, owners: int, chunk: int) -> Cut:
        """The cut for so many owners; ``chunk``: bytes of a chunk."""
        flat = tensor.view(-1)
        unit = max(ALIGNMENT // flat.itemsize, 1)
        length = -(-flat.numel() // (owners * unit)) * unit
        shares = [flat[owner * length :][:length] for owner in range(owners)]
        width = max(chunk // owners // ALIGNMENT * ALIGNMENT // flat.itemsize, unit)
        # An empty tensor is a chunk, too: it must not overtake those before it.
        return cls(flat, shares, width, max(-(-length // width), 1))

    def piece(self, owner: int, chunk: int) -> torch.Tensor:
        """What belongs to an owner in a chunk; may be empty."""
        return self.shares[owner][chunk * self.width :][: self.width]


class Memory:
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
) -> list[Memory]:
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
            memories.append(Memory(torch.frombuffer(mapped, dtype=torch.uint8), count, chunk))
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


@dataclass(slots=True)
class _Entry:
    """A tensor on its way, and what is done with each of its chunks."""

    stages: Sequence[Stage]
    num_chunks: int
    done: Callable[[Exception | None], None]
    next_chunk: int = 0


@dataclass(slots=True)
class _Chunk:
    entry: _Entry
    index: int
    number: int  # among all chunks of the pipeline
    stage: int = 0


class Pipeline:
    """Takes chunks through their stages in a thread, in step with the other ranks of a host.

    A rank begins a stage of a chunk when all have ended the stage before it, and puts a new chunk
    into a slot when all have ended with the old one. All ranks submit the same in the same order.

    Args:
        line: sockets to the other ranks; belong to the pipeline from now on.
        stages: of every chunk.
        slots: chunks under way.
        timeout: seconds to wait for a rank that neither answers nor ends.
        failed: is told the first error, in the thread, after all that was submitted.
    """

    def __init__(
        self,
        line: Mapping[int, socket.socket],
        stages: int,
        slots: int,
        timeout: float,
        failed: Callable[[Exception], None],
    ) -> None:
        self._line, self._stages, self._slots, self._failed = line, stages, slots, failed
        self._timeout = timeout
        wait = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        for peer in line.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self._ended = {rank: [0] * stages for rank in line}  # chunks, by stage
        self._left: set[int] = set()  # ranks that have closed
        self._num_chunks = 0
        self._queue: SimpleQueue[_Entry] = SimpleQueue()
        self._current: _Entry | None = None
        self._under_way: deque[_Chunk] = deque()
        self._wake = os.eventfd(0)
        # The lock: what is submitted while the pipeline fails must learn of it.
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._closing = False
        # A daemon: a script that fails while a peer is silent must end, not wait for the peer.
        self._thread = threading.Thread(target=self._serve, name="slipstream-host", daemon=True)
        self._thread.start()

    def submit(
        self,
        stages: Sequence[Stage],
        num_chunks: int,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Queue a tensor; ``done`` is called in the thread when its last chunk is through."""
        with self._lock:
            if self._error is None and not self._closing:
                self._queue.put(_Entry(stages, num_chunks, done))
                os.eventfd_write(self._wake, 1)
                return
        done(self._error or RuntimeError("the transport is closed"))

    def abort(self, error: Exception) -> None:
        """Fail here and on the other ranks of the host; from any thread."""
        with self._lock:
            self._error = self._error or error
            if not self._closing:
                for peer in self._line.values():
                    with suppress(OSError):  # it has ended
                        peer.shutdown(socket.SHUT_RDWR)  # wakes the thread, too

    def close(self) -> None:
        """End the thread once all that was submitted is through; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._thread.is_alive():
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        try:
            while self._fill():
                self._advance()
            for peer in self._line.values():
                _send(peer, _BYE)
        except Exception as error:  # of any kind: others wait for what was submitted
            self._fail(error)
        finally:
            with self._lock:
                self._closing = True
                for peer in self._line.values():
                    peer.close()
                os.close(self._wake)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error = self._error or error
        entries = [chunk.entry for chunk in self._under_way]
        entries += [self._current] if self._current else []
        while not self._queue.empty():
            entries.append(self._queue.get())
        for entry in {id(entry): entry for entry in entries}.values():
            entry.done(error)
        self._under_way.clear()
        self._current = None
        self._failed(error)

    def _fill(self) -> bool:
        """Take chunks under way as far as there are slots; wait for one if there is none."""
        while len(self._under_way) < self._slots:
            if self._current is None:
                try:
                    self._current = self._queue.get_nowait()
                except Empty:
                    if self._under_way:
                        return True
                    if self._closing:
                        return False
                    self._sleep()
                    continue
            entry, index = self._current, self._current.next_chunk
            self._under_way.append(_Chunk(entry, index, self._num_chunks))
            self._num_chunks += 1
            entry.next_chunk += 1
            if entry.next_chunk == entry.num_chunks:
                self._current = None
        return True

    def _sleep(self) -> None:
        """Wait for a tensor; learn of ranks that end meanwhile."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        ranks = {s.fileno(): rank for rank, s in self._line.items() if rank not in self._left}
        for file in ranks:
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll():
            if file in ranks:
                self._receive(ranks[file])
            else:
                os.eventfd_read(self._wake)

    def _advance(self) -> None:
        """Do the next stage of the first chunk for which that can be; else wait for a rank."""
        for chunk in self._under_way:
            if self._awaited(chunk) is None:
                break
        else:
            rank = self._awaited(self._under_way[0])
            assert rank is not None
            self._receive(rank)
            return
        chunk.entry.stages[chunk.stage](chunk.number % self._slots, chunk.index)
        for peer in self._line.values():
            _send(peer, chunk.stage)
        chunk.stage += 1
        if chunk.stage == self._stages:
            assert chunk is self._under_way[0]
            self._under_way.popleft()
            if chunk.index == chunk.entry.num_chunks - 1:
                chunk.entry.done(None)

    def _awaited(self, chunk: _Chunk) -> int | None:
        """A rank that must end a stage first; None: the next stage of the chunk can begin."""
        if chunk.stage:
            stage, count = chunk.stage - 1, chunk.number + 1
        else:
            stage, count = self._stages - 1, chunk.number + 1 - self._slots
        for rank, ended in self._ended.items():
            if ended[stage] < count:
                return rank
        return None

    def _receive(self, rank: int) -> None:
        """Hear of a rank which stages it has ended; wait until it says something."""
        try:
            message = self._line[rank].recv(256)
        except BlockingIOError:
            raise RuntimeError(
                f"rank {rank} of this host was silent for {self._timeout:g} s"
            ) from None
        except ConnectionResetError:
            message = b""
        for byte in message:
            if byte == _BYE:
                self._left.add(rank)
            else:
                self._ended[rank][byte] += 1
        if not message:
            raise RuntimeError(f"rank {rank} of this host has ended")


def _send(peer: socket.socket, byte: int) -> None:
    try:
        peer.send(_BYTES[byte])
    except OSError:  # it has ended: whether that is an error shows when it is waited for
        return


_BYTES = [bytes([value]) for value in range(256)]


@dataclass(slots=True)
class Shares:
    """What the ranks of a host do with the chunks of a tensor: the stages of a pipeline.

    Args:
        cut: of the tensor; share i belongs to row i modulo the number of rows.
        blocks: the places of its pieces, by slot, row and share.
        rows: one for each rank of the host.
        row: this rank's.
    """

    cut: Cut
    blocks: list[list[list[torch.Tensor]]]
    rows: int
    row: int

    def put(self, slot: int, chunk: int) -> None:
        """Copy the others' pieces into this rank's row."""
        for owner, block in enumerate(self.blocks[slot][self.row]):
            if owner % self.rows != self.row:
                _copy(self.cut.piece(owner, chunk), block)

    def add(self, slot: int, chunk: int) -> None:
        """Add the rows of this rank's pieces into its tensor."""
        rows = self.blocks[slot]
        for owner in range(self.row, len(rows[0]), self.rows):
            own = self.cut.piece(owner, chunk)
            if length := own.numel():
                pieces = [row[owner][:length] for row in rows]
                pieces[self.row] = own
                add_in_order(pieces, own)

    def give(self, slot: int, chunk: int) -> None:
        """Copy this rank's pieces to where all ranks find them: the first row."""
        for owner in range(self.row, len(self.blocks[slot][0]), self.rows):
            _copy(self.cut.piece(owner, chunk), self.blocks[slot][0][owner])

    def add_and_give(self, slot: int, chunk: int) -> None:
        """``add``, then ``give``: nobody but this rank reads its pieces of the first row before."""
        self.add(slot, chunk)
        self.give(slot, chunk)

    def put_all(self, slot: int, chunk: int) -> None:
        """Copy the whole chunk of a tensor without owners into this rank's row."""
        _copy(self.cut.piece(0, chunk), self.blocks[slot][self.row][0])

    def add_two(self, slot: int, chunk: int) -> None:
        """Add the other rank's row to the tensor, in the order of the rows."""
        own = self.cut.piece(0, chunk)
        if length := own.numel():
            pieces = [row[0][:length] for row in self.blocks[slot]]
            pieces[self.row] = own
            add_in_order(pieces, own)

    def take(self, slot: int, chunk: int) -> None:
        """Copy the others' pieces into the tensor."""
        for owner, block in enumerate(self.blocks[slot][0]):
            if owner % self.rows != self.row:
                piece = self.cut.piece(owner, chunk)
                if length := piece.numel():
                    piece.copy_(block[:length])


def _copy(piece: torch.Tensor, block: torch.Tensor) -> None:
    if length := piece.numel():
        block[:length].copy_(piece)


class SharedMemoryTransport:
    """All-reduces through memory that all ranks share; all else as ``flat`` does it.

    Sums in rank order, those of 16-bit floats in float32: the same bits on all ranks and in every
    run. Exactness: reordered; bitwise on two ranks.

    Raises:
        ClusterError: the ranks are not all on one host, or it gives no memory.
    """

    def __init__(self, config: SharedMemory, group: dist.ProcessGroup) -> None:
        self._flat = FlatTransport(Flat(), group)
        hosts = find_hosts(group, 1)
        if len(hosts.nodes) > 1:
            close_lines(hosts)
            raise ClusterError(
                f"gradients.transport shared_memory needs all ranks on one host; by host they are "
                f"{[list(node) for node in hosts.nodes]}; write gradients: {{transport: "
                "hierarchical}"
            )
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._owners = 1 if self._ranks == 2 else self._ranks
        [self._memory] = share_memory(hosts, self._owners, [0], [self._ranks], group)
        timeout, stages = timeout_of(group), 2 if self._ranks == 2 else 3
        slots = self._memory.slots
        self._pipeline = Pipeline(hosts.lines[0], stages, slots, timeout, lambda _: None)

    def prepare(self, requests: Sequence[Request]) -> None:
        """Nothing to do: a row is there before the tensor is."""

    def start(self, request: Request) -> Sequence[Work]:
        if not isinstance(request, AllReduce):
            return self._flat.start(request)
        cut, work = Cut.of(request.tensor, self._owners, self._memory.chunk), ThreadWork()
        shares = Shares(cut, self._memory.blocks(cut), self._ranks, self._rank)
        stages: Sequence[Stage] = (shares.put, shares.add_and_give, shares.take)
        if self._ranks == 2:
            stages = shares.put_all, shares.add_two
        self._pipeline.submit(stages, cut.num_chunks, work.complete)
        return [work]

    def close(self) -> None:
        self._pipeline.close()
        self._memory.free()


def close_lines(hosts: Hosts) -> None:
    """Close all connections."""
    for line in hosts.lines:
        for peer in line.values():
            peer.close()
