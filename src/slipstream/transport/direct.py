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
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeGuard

import torch
import torch.distributed as dist

from slipstream.strategy import Direct, Flat
from slipstream.transport.flat import FlatTransport
from slipstream.transport.p2p import start_transfer
from slipstream.transport.requests import AllReduce, Request
from slipstream.transport.work import ThreadWork, Work

AHEAD = 64 * 2**20
"""Bytes of pieces that are received ahead at most, beyond those of the tensor that is next."""
WINDOW = 4
"""Tensors whose sums are on their way before the thread waits for the first of them."""
ALIGNMENT = 64
"""Bytes; shares begin at multiples of it, as vectorized sums like."""
TAGS = 2**15
"""All-reduces after which tags begin anew; far more than are ever under way."""


@dataclass(slots=True)
class _AllReduce:
    """One all-reduce from its announcement to its end."""

    tag: int
    rows: torch.Tensor  # what the others send of the own share
    shares: Sequence[torch.Tensor]  # of the tensor, by rank
    pieces: Sequence[torch.Tensor] = ()  # of the own share, by rank
    pieces_in: Sequence[dist.Work] = ()
    sums_in: Sequence[dist.Work] = ()
    sent: Sequence[dist.Work] = ()
    work: ThreadWork = field(default_factory=ThreadWork)


class DirectTransport:
    """All-reduces by sends to the owner of each share and back; all else as ``flat`` does it.

    A tensor of ``n`` bytes makes each of p ranks send and receive ``2 (p - 1) / p * n``, as in a
    ring, in 2 hops instead of ``2 (p - 1)``. Sums in rank order, those of 16-bit floats in float32:
    the same bits on all ranks and in every run. Exactness: reordered; bitwise on two ranks.

    Memory: the pieces received ahead, at most `AHEAD` bytes and those of one tensor.

    Args:
        config: has no settings.
        group: carries the messages.
        members: ranks of the group that exchange, this one among them; None: all.
        first_tag: `TAGS` pairs of tags from this one on are used.
    """

    def __init__(
        self,
        config: Direct,
        group: dist.ProcessGroup,
        members: Sequence[int] | None = None,
        first_tag: int = 0,
    ) -> None:
        self._flat, self._group = FlatTransport(Flat(), group), group
        self._members = range(dist.get_world_size(group)) if members is None else members
        self._rank, self._ranks = self._members.index(dist.get_rank(group)), len(self._members)
        self._first_tag = first_tag
        # Every rank begins with its next neighbour, so that no two begin with the same peer.
        self._targets = [(self._rank + d) % self._ranks for d in range(1, self._ranks)]
        self._sources = [(self._rank - d) % self._ranks for d in range(1, self._ranks)]
        self._next_tag = 0
        self._announced: deque[_AllReduce] = deque()
        # The lock guards what follows: the thread frees pieces, and receives the next ones there.
        self._lock = threading.Lock()
        self._without_pieces: deque[_AllReduce] = deque()
        self._ahead = 0
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._started: SimpleQueue[_AllReduce | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prepare(self, requests: Sequence[AllReduce]) -> None:
        """Post the receives of the next backward pass."""
        try:
            tensors = [r.tensor for r in requests if _is_ours(r)]
            self._announce(tensors)
        except RuntimeError as error:  # a peer is gone already: ``start`` tells
            self._error = error

    def start(self, request: Request) -> Sequence[Work]:
        if not _is_ours(request):
            return self._flat.start(request)
        if self._error is not None:
            raise RuntimeError(f"an earlier exchange failed: {self._error}")
        if not self._announced:
            self._announce([request.tensor])
        entry = self._announced.popleft()
        try:
            entry.sent = self._send(entry.shares, 2 * entry.tag)
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

    def _announce(self, tensors: Sequence[torch.Tensor]) -> None:
        new = []
        for tensor in tensors:
            flat = tensor.view(-1)
            unit = max(ALIGNMENT // flat.itemsize, 1)
            length = -(-flat.numel() // (self._ranks * unit)) * unit
            shares = [flat[rank * length :][:length] for rank in range(self._ranks)]
            entry = _AllReduce(self._next_tag, flat[:0], shares)
            self._next_tag = (self._next_tag + 1) % TAGS
            entry.sums_in = self._receive(shares, 2 * entry.tag + 1)
            new.append(entry)
        self._announced.extend(new)
        with self._lock:
            sizes = {_size(entry.shares[self._rank]) for entry in new}
            self._free = {size: rows for size, rows in self._free.items() if size in sizes}
            self._without_pieces.extend(new)
            self._receive_pieces()

    def _receive_pieces(self) -> None:
        """Post the receives of pieces of the next all-reduces, as far as memory goes."""
        while self._without_pieces:
            entry = self._without_pieces[0]
            own = entry.shares[self._rank]
            num_bytes = own.nbytes * (self._ranks - 1)
            if self._ahead and self._ahead + num_bytes > AHEAD:
                return
            self._ahead += num_bytes
            free = self._free.get(_size(own))
            entry.rows = free.pop() if free else own.new_empty(self._ranks - 1, own.numel())
            entry.pieces = [*entry.rows[: self._rank], own, *entry.rows[self._rank :]]
            entry.pieces_in = self._receive(entry.pieces, 2 * entry.tag)
            self._without_pieces.popleft()

    def _receive(self, tensors: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        receives = {self._members[r]: tensors[r] for r in self._sources}
        return start_transfer(receives, {}, self._group, self._first_tag + tag)

    def _send(self, tensors: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        sends = {self._members[r]: tensors[r] for r in self._targets}
        return start_transfer({}, sends, self._group, self._first_tag + tag)

    # The thread that sums.

    def _serve(self) -> None:
        summed: deque[_AllReduce] = deque()
        while (entry := self._started.get()) is not None:
            summed.append(entry)
            try:
                if self._error is not None:
                    raise RuntimeError(f"an earlier exchange failed: {self._error}")
                self._sum(entry)
                while summed and (len(summed) > WINDOW or not self._more):
                    _wait(summed[0].sums_in)
                    _wait(summed[0].sent)
                    summed.popleft().work.complete()
            except Exception as error:  # of any kind: others wait for these works
                self._error = self._error or error
                while summed:
                    summed.popleft().work.complete(error)
            del entry  # it holds tensors, and the thread may now rest for long

    @property
    def _more(self) -> bool:
        """Whether another all-reduce is started or will be: its sum must not wait for this one."""
        return bool(self._announced) or not self._started.empty()

    def _sum(self, entry: _AllReduce) -> None:
        _wait(entry.pieces_in)
        own = entry.shares[self._rank]
        if own.numel():
            add_in_order(entry.pieces, own)
            entry.sent = [*entry.sent, *self._send([own] * self._ranks, 2 * entry.tag + 1)]
        with self._lock:
            self._ahead -= own.nbytes * (self._ranks - 1)
            self._free.setdefault(_size(own), []).append(entry.rows)
            self._receive_pieces()


def add_in_order(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Leave ``pieces[0] + pieces[1] + ...`` in ``out``, which may be one of them.

    16-bit floats are summed in float32 and rounded once. The others' values are overwritten.

    Example:
        >>> ones = torch.ones(1, dtype=torch.bfloat16)
        >>> add_in_order([256 * ones, ones, ones], ones)  # 256 + 1 is 256 in bfloat16
        >>> ones
        tensor([258.], dtype=torch.bfloat16)
    """
    total = pieces[0].float() if out.dtype in (torch.float16, torch.bfloat16) else pieces[0]
    for piece in pieces[1:-1]:
        total += piece
    if total.dtype == out.dtype:
        torch.add(total, pieces[-1], out=out)
    else:
        out.copy_(total.add_(pieces[-1]))


def _is_ours(request: Request) -> TypeGuard[AllReduce]:
    """gloo sends host memory alone, and an empty tensor needs no messages."""
    return isinstance(request, AllReduce) and not request.tensor.is_cuda


def _size(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.numel(), tensor.dtype


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
