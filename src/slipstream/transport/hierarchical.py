"""The hierarchical transport: sums inside each host, between the hosts, and back inside.

[Note: Rails]
A tensor is cut into as many shares as the largest host has ranks. Share j travels on *rail* j: one
rank of each host, the one with the local index j modulo the host's number of ranks. So all ranks
exchange at the same time, each another share; hosts may have different numbers of ranks, and it
does not matter how these are numbered. Between two of N hosts go 2 (N - 1) / N of a tensor's bytes
in all, instead of as often as a host has ranks (or of every hop of a ring whose neighbours are on
different hosts).

[Note: One all-reduce]
1. The ranks of a host leave the sum of each share with its rail's rank, through shared memory.
2. The ranks of a rail add up these sums, as ``direct`` or ``flat`` does it.
3. Inside each host, every rank copies the sums of the others' rails.
A thread each takes the tensors through (1) and (3), in order; (2) has threads of its own. So while
one tensor is between the hosts, later ones are summed inside them and earlier ones copied. Large
tensors are cut into parts for that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import ClusterError
from slipstream.strategy import Direct, Flat, Hierarchical
from slipstream.transport.direct import TAGS, DirectTransport
from slipstream.transport.flat import FlatTransport
from slipstream.transport.host_memory import share_memory
from slipstream.transport.host_pipeline import Pipeline
from slipstream.transport.host_shares import Cut, Shares
from slipstream.transport.hosts import find_hosts, timeout_of
from slipstream.transport.requests import AllReduce, Request
from slipstream.transport.work import ThreadWork, Work

PART = 4 * 2**20
"""Bytes of a tensor that are one all-reduce: while it is between the hosts, the next is summed."""


def rails(nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks of each rail, from the ranks of each host.

    Example:
        >>> rails([[0, 2], [1, 3]])
        [(0, 1), (2, 3)]
        >>> rails([[0, 1, 2], [3, 4], [5]])
        [(0, 3, 5), (1, 4, 5), (2, 3, 5)]
    """
    return [tuple(node[rail % len(node)] for node in nodes) for rail in range(max(map(len, nodes)))]


@dataclass(eq=False, slots=True)
class _AllReduce:
    """One all-reduce under way."""

    cut: Cut
    missing: int | None = None  # works of this rank's rails; None: not started yet
    work: ThreadWork = field(default_factory=ThreadWork)


class HierarchicalTransport:
    """All-reduces inside hosts and between them; all else as ``flat`` does it.

    Each of N hosts sends ``2 (N - 1) / N`` of a tensor to the others, whatever number of ranks it
    has. Sums are taken in rank order inside a host, then in the order of the hosts; those of 16-bit
    floats in float32, rounded inside and between. The same bits on all ranks and in every run.
    Exactness: reordered.

    Raises:
        ClusterError: a host gives no memory to share, or ``between: flat`` meets hosts of different
            numbers of ranks.
    """

    def __init__(self, config: Hierarchical, group: dist.ProcessGroup) -> None:
        self._flat = FlatTransport(Flat(), group)
        hosts = find_hosts(group, 2)
        local = hosts.neighbours
        self._ranks, self._rank = len(local), local.index(hosts.rank)
        every = rails(hosts.nodes)
        sizes = [len(node) for node in hosts.nodes]
        if isinstance(config.between, Flat) and len(set(sizes)) > 1:
            hosts.close()
            raise ClusterError(
                f"gradients.transport.between flat needs as many ranks on each host; they have "
                f"{sizes}; write between: direct"
            )
        self._owners = len(every)
        self._rails = {
            rail: _between(config.between, group, members, rail)
            for rail, members in enumerate(every)
            if hosts.rank in members and len(members) > 1
        }
        self._into, self._out_of = share_memory(
            hosts, self._owners, [0, 1], [self._ranks, 1], group
        )
        # The lock guards what follows: works of rails end in threads of their own.
        self._lock = threading.RLock()
        self._between: deque[_AllReduce] = deque()
        self._under_way: set[_AllReduce] = set()
        self._error: Exception | None = None
        self._pipelines = []
        if self._ranks > 1:
            timeout, slots = timeout_of(group), self._into.slots
            self._pipelines = [Pipeline(x, 2, slots, timeout, self._fail) for x in hosts.lines]

    def prepare(self, requests: Sequence[Request]) -> None:
        """Announce the shares of the next backward pass, rail by rail."""
        ours = [request.tensor for request in requests if isinstance(request, AllReduce)]
        cuts = [self._cut(part) for tensor in ours for part in _parts(tensor)]
        for rail, transport in self._rails.items():
            transport.prepare([AllReduce(cut.shares[rail]) for cut in cuts])

    def start(self, request: Request) -> Sequence[Work]:
        if not isinstance(request, AllReduce):
            return self._flat.start(request)
        return [self._start(part) for part in _parts(request.tensor)]

    def close(self) -> None:
        for part in (*self._pipelines, *self._rails.values()):
            part.close()
        for memory in (self._into, self._out_of):
            memory.free()

    def _start(self, part: torch.Tensor) -> Work:
        entry = _AllReduce(self._cut(part))
        with self._lock:
            if self._error is not None:
                raise RuntimeError(f"an earlier exchange failed: {self._error}")
            self._under_way.add(entry)
        if self._pipelines:
            shares = Shares(entry.cut, self._into.blocks(entry.cut), self._ranks, self._rank)
            stages, then = (shares.put, shares.add), partial(self._exchange, entry)
            self._pipelines[0].submit(stages, entry.cut.num_chunks, then)
        else:
            self._exchange(entry, None)
        return entry.work

    def _cut(self, tensor: torch.Tensor) -> Cut:
        return Cut.of(tensor, self._owners, self._into.chunk)

    def _exchange(self, entry: _AllReduce, error: Exception | None) -> None:
        """This host's sums are there: exchange those of this rank's rails with the other hosts."""
        if error is not None:
            return  # the pipeline tells
        with self._lock:
            self._between.append(entry)
        try:
            works = [
                work
                for rail, transport in self._rails.items()
                for work in transport.start(AllReduce(entry.cut.shares[rail]))
            ]
        except RuntimeError as failure:
            self._fail(failure)
            return
        entry.missing = len(works)
        for work in works:
            work.get_future().add_done_callback(partial(self._exchanged, entry))
        self._spread_next()

    def _exchanged(self, entry: _AllReduce, rail: torch.futures.Future[Any]) -> None:
        """One rail has all hosts' sum."""
        try:
            rail.value()
        except Exception as error:  # of any kind: others wait for these works
            self._fail(error)
            return
        with self._lock:
            assert entry.missing is not None
            entry.missing -= 1
        self._spread_next()

    def _spread_next(self) -> None:
        """Spread those whose sums are there, in order: the backend may end a later one first."""
        with self._lock:
            while self._between and self._between[0].missing == 0:
                self._spread(self._between.popleft())

    def _spread(self, entry: _AllReduce) -> None:
        """All sums are there: copy them to all ranks of this host."""
        if not self._pipelines:
            self._finish(entry, None)
            return
        shares = Shares(entry.cut, self._out_of.blocks(entry.cut), self._ranks, self._rank)
        stages, then = (shares.give, shares.take), partial(self._finish, entry)
        self._pipelines[1].submit(stages, entry.cut.num_chunks, then)

    def _finish(self, entry: _AllReduce, error: Exception | None) -> None:
        with self._lock:
            if entry not in self._under_way:
                return
            self._under_way.remove(entry)
        entry.work.complete(error)

    def _fail(self, error: Exception) -> None:
        """End all that is under way, here and on the other ranks of this host."""
        with self._lock:
            self._error = self._error or error
            entries = list(self._under_way)
        for pipeline in self._pipelines:
            pipeline.abort(error)
        for entry in entries:
            self._finish(entry, error)


def _between(
    config: Flat | Direct, group: dist.ProcessGroup, members: Sequence[int], rail: int
) -> FlatTransport | DirectTransport:
    """What carries one rail."""
    if isinstance(config, Direct):
        return DirectTransport(config, group, members, 2 * TAGS * rail)
    world = dist.get_process_group_ranks(group)
    # torch derives the name of such a group from how many the rank has made before: all ranks make
    # one, as all hosts have as many ranks.
    made = dist.new_group([world[rank] for rank in members], use_local_synchronization=True)
    return FlatTransport(config, made)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor as parts of at most `PART` bytes; an empty one is one part."""
    parts: Sequence[torch.Tensor] = tensor.view(-1).split(max(PART // tensor.itemsize, 1))
    return parts
