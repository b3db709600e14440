"""The ordered channel: runs the exchanges of this process one after the other, beside backward.

Never decides what is exchanged, nor when.

[Note: Order and lanes]
Every rank submits the same exchanges in the same order, and exchange ``k`` runs on lane ``k % lanes``. A
lane is one thread with a process group of its own, so collectives of one group are issued in one order on
every rank, however the threads are scheduled, and an exchange of several collectives (a low-rank codec:
first P, then Q) is one unit that no other can come between. Two lanes keep the wire busy while one of
them waits for a peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import torch
import torch.distributed as dist

Exchange = Callable[[dist.ProcessGroup], None]


class Channel:
    """Threads that run submitted exchanges in order, one lane for each process group.

    On CUDA every lane has a side stream: an exchange starts after the work that its submitter had queued
    by then, and ``wait()`` makes the submitter's stream wait, not its thread.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._lanes = [_Lane(group, device, f"slipstream-lane{i}") for i, group in enumerate(groups)]
        self._submitted = 0

    def submit(self, exchange: Exchange) -> None:
        """Run ``exchange(group)`` after all that were submitted to its lane before; returns at once."""
        self._lanes[self._submitted % len(self._lanes)].submit(exchange)
        self._submitted += 1

    def wait(self) -> None:
        """Return when all submitted exchanges are done.

        Raises:
            Exception: the first one that an exchange raised, after the other lanes have come to rest.
        """
        errors = [error for lane in self._lanes if (error := lane.wait()) is not None]
        self._submitted = 0
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads; the groups stay their maker's."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One thread, one group, one queue."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        self._group = group
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[tuple[Exchange, torch.cuda.Event | None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._pending = 0
        self._count = threading.Lock()
        self._error: Exception | None = None
        # A daemon: a script that fails while a peer is silent must end, not wait for the peer.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, exchange: Exchange) -> None:
        with self._count:
            self._pending += 1
            self._idle.clear()
        ready = torch.cuda.current_stream().record_event() if self._stream else None
        self._queue.put((exchange, ready))

    def wait(self) -> Exception | None:
        self._idle.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            exchange, ready = item
            try:
                if self._error is None:  # after a failure the peers are lost: do not wait for them
                    with self._on_stream(ready):
                        exchange(self._group)
            except Exception as error:
                self._error = error
            finally:
                with self._count:
                    self._pending -= 1
                    if not self._pending:
                        self._idle.set()
                del exchange, item  # they hold the bucket; the loop may now rest for long

    def _on_stream(self, ready: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if ready is not None:
            self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)
