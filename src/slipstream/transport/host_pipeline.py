"""Takes the chunks of tensors through their stages, in step with the other ranks of a host.

[Note: Order and waiting]
A rank tells its neighbours by a byte through a socket that it has ended a stage of a chunk, and a
rank that needs the byte sleeps until it is there. So nobody spins, and a rank that dies closes its
sockets, which wakes all who wait for it. The sockets also order the accesses to the memory: what a
rank wrote before it sent is seen by who has received, on any machine, as the kernel's queues demand
it. No flag in the memory is ever read.
"""

from __future__ import annotations

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

_BYE = 255

ChunkStage = Callable[[int, int], None]
"""What a rank does with a chunk before the others may go on; gets its slot and its index."""


@dataclass(slots=True)
class _Entry:
    """A tensor on its way, and what is done with each of its chunks."""

    stages: Sequence[ChunkStage]
    num_chunks: int
    done: Callable[[Exception | None], None]
    next_chunk: int = 0


@dataclass(slots=True)
class _Chunk:
    entry: _Entry
    index: int
    number: int  # among all chunks of the pipeline
    stage: int = 0


class ChunkPipeline:
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
        stages: Sequence[ChunkStage],
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
            # Under the lock: abort() must not shut a number down that is another file's by then.
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
        peer.send(bytes([byte]))
    except OSError:  # it has ended: whether that is an error shows when it is waited for
        return
