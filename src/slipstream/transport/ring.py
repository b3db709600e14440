"""The ring transport: partial sums go round from neighbour to neighbour, then the sums.

[Note: Where it pays]
Each of p ranks sends the bytes and the number of messages of ``direct``, in ``2 (p - 1)`` hops one
after the other instead of 2. But all come from one neighbour and go to the other: nobody receives
from p - 1 ranks at the same time, whose messages queue and get lost where the links meet. Tensors
in flight beside one another hide the hops.

[Note: One all-reduce]
A tensor is cut into shares, one a rank. Message i that a rank receives, from its left neighbour,
carries share ``rank - 2 - i`` modulo p.
1. Messages 0 to p - 2 are partial sums: the rank adds its own values, and sends on what it has got.
   The last of them makes share ``rank`` whole.
2. Messages p - 1 to 2 p - 3 are sums, received in the tensor itself, and sent on as they are. Each
   overwrites what went into it: the share has come through this rank before.

A reduce-scatter is the first half, an all-gather the second.

[Note: A thread for each tensor in flight]
gloo cannot say which message has come, so a thread that served several tensors would wait for one
of these while the message of another is there. Worse, ranks that start the tensors at different
times would wait for each other for ever: rank A for the last sums of one tensor, for which rank B
must pass on a partial sum, and B for another tensor, which A takes up after the first. So a thread
takes a tensor through all of its hops.

[Note: When a rank is gone]
Only its neighbours notice. A rank that fails closes its connections, so that its own neighbours do,
and so on round the ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import TypeGuard

import torch
import torch.distributed as dist

from slipstream.strategy import Flat, Ring
from slipstream.transport.ahead import TAGS, Pieces, ReceiveBuffers, cut_into_shares
from slipstream.transport.flat import FlatTransport
from slipstream.transport.p2p import start_transfer
from slipstream.transport.requests import AllGather, AllReduce, ReduceScatter, Request
from slipstream.transport.work import ThreadWork, Work

WINDOW = 8
"""Tensors that go round at the same time."""


@dataclass(slots=True)
class _Exchange:
    """One request from its announcement to its end."""

    shares: Sequence[torch.Tensor]  # by rank
    messages: range  # those of an all-reduce that make up this request
    tag: int  # of message 0
    out: torch.Tensor | None = None  # where a reduce-scatter leaves the sum
    rows: torch.Tensor | None = None  # for partial sums
    receives: list[list[dist.Work]] = field(default_factory=list)
    posted: threading.Event = field(default_factory=threading.Event)
    sent: list[dist.Work] = field(default_factory=list)
    work: ThreadWork = field(default_factory=ThreadWork)


class RingTransport:
    """All-reduces, reduce-scatters and all-gathers from neighbour to neighbour.

    A tensor of ``n`` bytes makes each of p ranks send and receive ``2 (p - 1) / p * n``. Share s is
    summed as ``x[s + 1] + x[s + 2] + ... + x[s]``, ranks modulo p, in the dtype that travels:
    16-bit floats are rounded at every hop. The same bits on all ranks and in every run. Exactness:
    reordered; bitwise on two ranks.

    Memory: the partial sums received ahead, at most `AHEAD` bytes and those of one tensor.
    Broadcasts, all-to-alls and the memory of other devices travel as ``flat`` sends them.
    """

    def __init__(self, config: Ring, group: dist.ProcessGroup) -> None:
        self._flat, self._group = FlatTransport(Flat(), group), group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._left, self._right = (self._rank - 1) % self._ranks, (self._rank + 1) % self._ranks
        self._next_tag = 0
        self._announced: deque[_Exchange] = deque()
        self._buffers = ReceiveBuffers()
        self._started: SimpleQueue[_Exchange | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)  # threads that no started exchange is meant for
        self._error: Exception | None = None

    def prepare(self, requests: Sequence[Request]) -> None:
        """Post the receives of what comes next."""
        self._announce([request for request in requests if _goes_round(request)])

    def start(self, request: Request) -> Sequence[Work]:
        if not _goes_round(request):
            return self._flat.start(request)
        if self._error is not None:
            raise RuntimeError(f"an earlier exchange failed: {self._error}")
        if not self._announced:
            self._announce([request])
        entry = self._announced.popleft()
        if isinstance(request, AllGather):
            own = request.receive[self._rank]
            if own.data_ptr() != request.send.data_ptr():
                own.copy_(request.send)
        try:
            self._send(entry, entry.messages.start)
        except RuntimeError as error:  # the thread tells
            self._fail(error)
        if not self._idle.acquire(blocking=False) and len(self._threads) < WINDOW:
            # Daemons: a script that fails while a peer is silent must end, not wait for the peer.
            thread = threading.Thread(target=self._serve, name="slipstream-ring", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._started.put(entry)
        return [entry.work]

    def close(self) -> None:
        for _ in self._threads:
            self._started.put(None)
        deadline = monotonic() + 1.0
        while self._threads:
            self._threads.pop().join(timeout=max(deadline - monotonic(), 0.0))

    def _announce(self, requests: Sequence[AllReduce | ReduceScatter | AllGather]) -> None:
        new = [self._exchange(request) for request in requests]
        self._announced.extend(new)
        self._buffers.announce([self._pieces(entry) for entry in new])

    def _exchange(self, request: AllReduce | ReduceScatter | AllGather) -> _Exchange:
        half, tag = self._ranks - 1, self._next_tag
        self._next_tag = (tag + 2 * half) % (TAGS * 2 * half or 1)
        match request:
            case AllReduce(tensor):
                return _Exchange(
                    cut_into_shares(tensor.view(-1), self._ranks), range(2 * half), tag
                )
            case ReduceScatter(rows, out):
                return _Exchange(rows.unbind(), range(half), tag, out)
            case AllGather(_, receive):
                return _Exchange(receive.unbind(), range(half, 2 * half), tag)

    def _pieces(self, entry: _Exchange) -> Pieces:
        rows = len(range(entry.messages.start, self._ranks - 1))
        first = entry.shares[0]  # no other is longer
        return Pieces(rows, first.numel(), first.dtype, partial(self._receive, entry))

    def _share(self, entry: _Exchange, message: int) -> torch.Tensor:
        return entry.shares[(self._rank - 2 - message) % self._ranks]

    def _receive(self, entry: _Exchange, rows: torch.Tensor) -> None:
        """Post all receives of an exchange."""
        entry.rows = rows
        try:
            for message in entry.messages:
                tensor = self._share(entry, message)
                if message < self._ranks - 1:
                    tensor = rows[message][: tensor.numel()]
                tag = entry.tag + message
                works = start_transfer({self._left: tensor}, {}, self._group, tag)
                entry.receives.append(works)
        except RuntimeError as error:  # a peer is gone: ``start`` or the thread tells
            self._fail(error)
        entry.posted.set()

    def _send(self, entry: _Exchange, message: int) -> None:
        """Send the right neighbour its message, if that is one of the exchange's."""
        if message in entry.messages:
            share, tag = self._share(entry, message - 1), entry.tag + message
            entry.sent += start_transfer({}, {self._right: share}, self._group, tag)

    def _fail(self, error: Exception) -> Exception:
        """Keep the first error, and close all connections of this rank in the group.

        gloo does that when a wait times out: here, for a message that nobody sends.
        """
        self._error = self._error or error
        for peer in (self._right, self._left):
            with suppress(RuntimeError):  # they are closed
                tag = 2 * (self._ranks - 1) * TAGS
                [work] = start_transfer({peer: torch.empty(1)}, {}, self._group, tag)
                work.wait(timedelta(milliseconds=1))
        return self._error

    # The threads.

    def _serve(self) -> None:
        while (entry := self._started.get()) is not None:
            try:
                self._carry(entry)
                entry.work.complete()
            except Exception as error:  # of any kind: others wait for this work
                entry.work.complete(self._fail(error))
            del entry  # it holds tensors, and the thread may now rest for long
            self._idle.release()

    def _carry(self, entry: _Exchange) -> None:
        """Take a tensor through all of its hops."""
        entry.posted.wait()
        try:
            if self._error is not None:
                raise self._error
            for message, works in zip(entry.messages, entry.receives, strict=True):
                if message == self._ranks - 1:
                    self._give_back(entry)
                _wait(works)
                share = self._share(entry, message)
                if entry.rows is not None:
                    share += entry.rows[message][: share.numel()]
                self._send(entry, message + 1)
            _wait(entry.sent)
        finally:
            self._give_back(entry)
        if entry.out is not None:
            entry.out.copy_(entry.shares[self._rank])

    def _give_back(self, entry: _Exchange) -> None:
        """The partial sums are added, or never will be."""
        rows, entry.rows = entry.rows, None
        if rows is not None:
            self._buffers.give_back(rows)


def _goes_round(request: Request) -> TypeGuard[AllReduce | ReduceScatter | AllGather]:
    """gloo sends host memory alone."""
    match request:
        case AllReduce(tensor) | ReduceScatter(tensor, _) | AllGather(tensor, _):
            return not tensor.is_cuda
    return False


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
