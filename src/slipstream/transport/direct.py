"""The direct transport: every rank owns a share of each tensor, sums it, and sends out the sum.

[Note: Why not the backend's ring]
gloo's ring sends a piece once its peer has said that it receives, and every hop waits for a thread
to get a core: 2 (p - 1) waits one after the other, which are long while backward computes on all
cores. Here a piece takes two hops, to its owner and back, and its receiver is posted long before:
those of a whole backward pass when that begins.

[Note: One all-reduce]
1. ``start`` sends every owner its share of this rank's tensor.
2. A thread waits for the others' pieces of this rank's share, in the order of the starts, adds them
   in rank order, and sends the sum to all others, while later tensors are already on their way.
3. The others' sums arrive in the tensor itself: each overwrites what its owner has received before.

A reduce-scatter is the first two steps without the sending; an all-gather is the third, and an
all-to-all the third with a tensor of its own for each rank.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TypeGuard

import torch
import torch.distributed as dist

from slipstream.strategy import DirectConfig, FlatConfig, ShardedConfig
from slipstream.transport.ahead import TAGS, Pieces, ReceiveBuffers, cut_into_shares
from slipstream.transport.flat import FlatTransport
from slipstream.transport.p2p import start_transfer
from slipstream.transport.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Request,
)
from slipstream.transport.work import ThreadWork, Work

WINDOW = 4
"""Tensors whose sums are on their way before the thread waits for the first of them."""


_Ours = AllReduce | ReduceScatter | AllGather | AllToAll


@dataclass(slots=True)
class _Exchange:
    """One request from its announcement to its end.

    Tensors and works by rank: what leaves this rank with the first tag of the exchange, what comes
    with it to be summed, where the sum goes, and what comes with the second tag.
    """

    tag: int
    parts: Sequence[torch.Tensor] = ()
    rows: torch.Tensor | None = None  # what the others send of the own part
    pieces: Sequence[torch.Tensor] = ()
    pieces_in: Sequence[dist.Work] = ()
    out: torch.Tensor | None = None
    sends_sum: bool = False
    results_in: Sequence[dist.Work] = ()
    sent: Sequence[dist.Work] = ()
    work: ThreadWork = field(default_factory=ThreadWork)


class DirectTransport:
    """All-reduces by sends to the owner of each share and back, and their halves alone.

    A tensor of ``n`` bytes makes each of p ranks send and receive ``2 (p - 1) / p * n``, as in a
    ring, in 2 hops instead of ``2 (p - 1)``. Sums in rank order, those of 16-bit floats in float32:
    the same bits on all ranks and in every run. Exactness: reordered; bitwise on two ranks.

    Memory: the pieces received ahead, at most `AHEAD` bytes and those of one tensor. Broadcasts
    and the memory of other devices travel as ``flat`` sends them.

    Args:
        config: has no settings that matter here.
        group: carries the messages.
        members: ranks of the group that exchange, this one among them; None: all.
        first_tag: `TAGS` pairs of tags from this one on are used.
    """

    def __init__(
        self,
        config: DirectConfig | ShardedConfig,
        group: dist.ProcessGroup,
        members: Sequence[int] | None = None,
        first_tag: int = 0,
    ) -> None:
        self._flat, self._group = FlatTransport(FlatConfig(), group), group
        self._members = range(dist.get_world_size(group)) if members is None else members
        self._rank, self._ranks = self._members.index(dist.get_rank(group)), len(self._members)
        self._first_tag = first_tag
        # Every rank begins with its next neighbour, so that no two begin with the same peer.
        self._targets = [(self._rank + d) % self._ranks for d in range(1, self._ranks)]
        self._sources = [(self._rank - d) % self._ranks for d in range(1, self._ranks)]
        self._next_tag = 0
        self._announced: deque[_Exchange] = deque()
        self._sums_to_come = 0  # announced and not started
        self._buffers = ReceiveBuffers()
        self._started: SimpleQueue[_Exchange | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prepare(self, requests: Sequence[Request]) -> None:
        """Post the receives of what comes next."""
        try:
            self._announce([request for request in requests if _is_ours(request)])
        except RuntimeError as error:  # a peer is gone already: ``start`` tells
            self._error = error

    def start(self, request: Request) -> Sequence[Work]:
        if not _is_ours(request):
            return self._flat.start(request)
        if self._error is not None:
            raise RuntimeError(f"an earlier exchange failed: {self._error}")
        if not self._announced:
            self._announce([request])
        entry = self._announced.popleft()
        if isinstance(request, AllGather | AllToAll):
            return self._deliver(entry, request)
        self._sums_to_come -= 1  # before the thread gets it: it must not wait for one more
        try:
            entry.sent = self._send(entry.parts, 2 * entry.tag)
        except RuntimeError as error:  # the thread tells, and ends all that is under way
            self._error = error
        if self._thread is None:
            # A daemon: a script that fails while a peer is silent must end, not wait for the peer.
            self._thread = threading.Thread(target=self._serve, name="slipstream-sum", daemon=True)
            self._thread.start()
        self._started.put(entry)
        return [entry.work]

    def close(self) -> None:
        self._started.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _announce(self, requests: Sequence[_Ours]) -> None:
        new = [self._exchange(request) for request in requests]
        self._announced.extend(new)
        sums = [entry for entry in new if entry.parts]
        self._sums_to_come += len(sums)
        self._buffers.announce([self._pieces(entry) for entry in sums])

    def _exchange(self, request: _Ours) -> _Exchange:
        """A request with its tags, the receives of its results posted."""
        entry = _Exchange(self._next_tag)
        self._next_tag = (self._next_tag + 1) % TAGS
        match request:
            case AllGather(_, receive) | AllToAll(_, receive):
                results: Sequence[torch.Tensor] = receive.unbind()
            case AllReduce(tensor):
                results = entry.parts = cut_into_shares(tensor.view(-1), self._ranks)
                entry.out, entry.sends_sum = results[self._rank], True
            case ReduceScatter(rows, out):
                entry.parts, entry.out = rows.unbind(), out
                return entry
        entry.results_in = self._receive(results, 2 * entry.tag + 1)
        return entry

    def _deliver(self, entry: _Exchange, request: AllGather | AllToAll) -> list[dist.Work]:
        given: Sequence[torch.Tensor] = [request.send] * self._ranks
        if isinstance(request, AllToAll):
            given = request.send.unbind()
        sent = self._send(given, 2 * entry.tag + 1)
        own = request.receive[self._rank]
        if own.data_ptr() != given[self._rank].data_ptr():
            own.copy_(given[self._rank])
        return [*entry.results_in, *sent]

    def _pieces(self, entry: _Exchange) -> Pieces:
        own = entry.parts[self._rank]
        post = partial(self._receive_pieces, entry)
        return Pieces(self._ranks - 1, own.numel(), own.dtype, post)

    def _receive_pieces(self, entry: _Exchange, rows: torch.Tensor) -> None:
        entry.rows = rows
        entry.pieces = [*rows[: self._rank], entry.parts[self._rank], *rows[self._rank :]]
        entry.pieces_in = self._receive(entry.pieces, 2 * entry.tag)

    def _receive(self, tensors: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        receives = {self._members[r]: tensors[r] for r in self._sources}
        return start_transfer(receives, {}, self._group, self._first_tag + tag)

    def _send(self, tensors: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        sends = {self._members[r]: tensors[r] for r in self._targets}
        return start_transfer({}, sends, self._group, self._first_tag + tag)

    # The thread that sums.

    def _serve(self) -> None:
        summed: deque[_Exchange] = deque()
        while (entry := self._started.get()) is not None:
            summed.append(entry)
            try:
                if self._error is not None:
                    raise RuntimeError(f"an earlier exchange failed: {self._error}")
                self._sum(entry)
                while summed and (len(summed) > WINDOW or not self._more):
                    _wait(summed[0].results_in)
                    _wait(summed[0].sent)
                    summed.popleft().work.complete()
            except Exception as error:  # of any kind: others wait for these works
                self._error = self._error or error
                while summed:
                    summed.popleft().work.complete(error)
            del entry  # it holds tensors, and the thread may now rest for long

    @property
    def _more(self) -> bool:
        """Whether another sum is started or will be: its sending must not wait for this one."""
        return self._sums_to_come > 0 or not self._started.empty()

    def _sum(self, entry: _Exchange) -> None:
        _wait(entry.pieces_in)
        own, out = entry.parts[self._rank], entry.out
        assert out is not None
        assert entry.rows is not None
        if own.numel():
            add_in_order(entry.pieces, out)
            if entry.sends_sum:
                entry.sent = [*entry.sent, *self._send([out] * self._ranks, 2 * entry.tag + 1)]
        self._buffers.give_back(entry.rows)


def add_in_order(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Leave ``pieces[0] + pieces[1] + ...`` in ``out``, which may be one of them.

    16-bit floats are summed in float32 and rounded at most once. The others' values are
    overwritten.

    Example:
        >>> ones = torch.ones(1, dtype=torch.bfloat16)
        >>> add_in_order([256 * ones, ones, ones], ones)  # 256 + 1 is 256 in bfloat16
        >>> ones
        tensor([258.], dtype=torch.bfloat16)
    """
    half = pieces[0].dtype in (torch.float16, torch.bfloat16)
    total = pieces[0].float() if half else pieces[0]
    for piece in pieces[1:-1]:
        total += piece
    if total.dtype == out.dtype:
        torch.add(total, pieces[-1], out=out)
    else:
        out.copy_(total.add_(pieces[-1]))


def _is_ours(request: Request) -> TypeGuard[_Ours]:
    """gloo sends host memory alone."""
    match request:
        case AllReduce(tensor) | ReduceScatter(tensor, _):
            return not tensor.is_cuda
        case AllGather(tensor, _) | AllToAll(tensor, _):
            return not tensor.is_cuda
    return False


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
