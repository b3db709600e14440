"""The hierarchical transport: sums inside each host, between the hosts, and back inside.

[Note: Rails]
A tensor is cut into as many shares as the largest host has ranks. Share j travels on rail j
(``hosts.Rails``). So all ranks exchange at the same time, each another share; hosts may have
different numbers of ranks, and it does not matter how these are numbered. Between two of N hosts go
2 (N - 1) / N of a tensor's bytes in all, instead of as often as a host has ranks (or of every hop
of a ring whose neighbours are on different hosts).

[Note: One all-reduce]
1. The ranks of a host leave the sum of each share with its rail's rank, through shared memory.
2. The ranks of a rail add up these sums, as ``direct`` or ``flat`` does it.
3. Inside each host, every rank copies the sums of the others' rails.
A thread each takes the tensors through (1) and (3), in order; (2) has threads of its own. So while
one tensor is between the hosts, later ones are summed inside them and earlier ones copied. Large
tensors are cut into parts for that.

A codec asks for the same phases one by one (``ReduceInHosts``, ``BetweenHosts``,
``SpreadInHosts``), and encodes its rails' shares between them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slipstream.cluster.groups import new_group, timeout_of
from slipstream.errors import ClusterError
from slipstream.strategy import DirectConfig, FlatConfig, HierarchicalConfig
from slipstream.transport.ahead import TAGS
from slipstream.transport.consistency import check_groups
from slipstream.transport.direct import DirectTransport
from slipstream.transport.flat import FlatTransport
from slipstream.transport.host_memory import share_memory
from slipstream.transport.host_pipeline import ChunkPipeline
from slipstream.transport.host_shares import Cut, HostSum
from slipstream.transport.hosts import Hosts, Rails, find_hosts
from slipstream.transport.requests import (
    AllReduce,
    BetweenHosts,
    ReduceInHosts,
    Request,
    SpreadInHosts,
)
from slipstream.transport.work import ThreadWork, Work

PART = 4 * 2**20
"""Bytes of a tensor that are one all-reduce: while it is between the hosts, the next is summed."""


@dataclass(eq=False, slots=True)
class _AllReduce:
    """One all-reduce under way."""

    cut: Cut
    missing: int | None = None  # works of this rank's rails; None: not started yet
    work: ThreadWork = field(default_factory=ThreadWork)


class HierarchicalTransport:
    """All-reduces inside hosts and between them, whole or by phases; all else as ``flat`` does it.

    Each of N hosts sends ``2 (N - 1) / N`` of a tensor to the others, whatever number of ranks it
    has. Sums are taken in rank order inside a host, then in the order of the hosts; those of 16-bit
    floats in float32, rounded inside and between. The same bits on all ranks and in every run.
    Exactness: reordered.

    Attributes:
        rails: between the hosts of the group's ranks.

    Raises:
        ClusterError: a host gives no memory to share, or ``between: flat`` meets hosts of different
            numbers of ranks.
        MismatchError: ``between: flat`` meets ranks with different numbers of process groups.
    """

    def __init__(self, config: HierarchicalConfig, group: dist.ProcessGroup) -> None:
        self._flat = FlatTransport(FlatConfig(), group)
        hosts = find_hosts(group, 2)
        local = hosts.neighbours
        self._ranks, self._rank = len(local), local.index(hosts.rank)
        self.rails = Rails.of(hosts.nodes, hosts.rank)
        if isinstance(config.between, FlatConfig):
            try:
                _check_groups(hosts, group)
            except Exception:
                hosts.close()
                raise
        self._owners = len(self.rails.members)
        self._rails = {
            rail: _between(config.between, group, self.rails.members[rail], rail)
            for rail in (self.rails.own if self.rails.num_hosts > 1 else ())
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
            timeout, slots = timeout_of(group).total_seconds(), self._into.slots
            self._pipelines = [ChunkPipeline(x, 2, slots, timeout, self._fail) for x in hosts.lines]

    def prepare(self, requests: Sequence[Request]) -> None:
        """Announce the shares of the next backward pass, rail by rail."""
        ours = [request.tensor for request in requests if isinstance(request, AllReduce)]
        cuts = [self._cut(part) for tensor in ours for part in _parts(tensor)]
        for rail, transport in self._rails.items():
            transport.prepare([AllReduce(cut.shares[rail]) for cut in cuts])

    def start(self, request: Request) -> Sequence[Work]:
        work = ThreadWork()
        match request:
            case AllReduce(tensor):
                return [self._start(part) for part in _parts(tensor)]
            case ReduceInHosts(tensor, borders):
                self._reduce(Cut.at(borders, tensor, self._into.chunk), work.complete)
            case SpreadInHosts(tensor, borders):
                self._spread(Cut.at(borders, tensor, self._into.chunk), work.complete)
            case BetweenHosts(requests):
                return self._start_on_rails(requests)
            case _:
                return self._flat.start(request)
        return [work]

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
        self._reduce(entry.cut, partial(self._exchange, entry))
        return entry.work

    def _cut(self, tensor: torch.Tensor) -> Cut:
        return Cut.even(tensor, self._owners, self._into.chunk)

    def _reduce(self, cut: Cut, then: Callable[[Exception | None], None]) -> None:
        """Leave this host's sum of each share with the rank of its rail."""
        if not self._pipelines:
            then(None)
            return
        shares = HostSum(cut, self._into.blocks(cut), self._ranks, self._rank)
        self._pipelines[0].submit((shares.put, shares.add), cut.num_chunks, then)

    def _spread(self, cut: Cut, then: Callable[[Exception | None], None]) -> None:
        """Copy each share from the rank of its rail to all ranks of this host."""
        if not self._pipelines:
            then(None)
            return
        shares = HostSum(cut, self._out_of.blocks(cut), self._ranks, self._rank)
        self._pipelines[1].submit((shares.give, shares.take), cut.num_chunks, then)

    def _start_on_rails(self, requests: Mapping[int, Request]) -> Sequence[Work]:
        try:
            return [
                _RailWork(work, self._fail)
                for rail, request in requests.items()
                for work in self._rails[rail].start(request)
            ]
        except RuntimeError as error:
            self._fail(error)
            raise

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
                entry = self._between.popleft()
                self._spread(entry.cut, partial(self._finish, entry))

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


@dataclass(frozen=True, slots=True)
class _RailWork:
    """A work on a rail: where it fails, the ranks of this host must not wait for this one."""

    work: Work
    failed: Callable[[Exception], None]

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self.failed(error)
            raise

    def get_future(self) -> torch.futures.Future[Any]:
        return self.work.get_future()


def _check_groups(hosts: Hosts, group: dist.ProcessGroup) -> None:
    """Refuse ranks that cannot make the groups of all rails at the same time. Collective.

    Raises:
        ClusterError: hosts have different numbers of ranks.
        MismatchError: ranks have different numbers of groups.
    """
    sizes = [len(node) for node in hosts.nodes]
    if len(set(sizes)) > 1:
        raise ClusterError(
            f"gradients.transport.between flat needs as many ranks on each host; they have "
            f"{sizes}; write between: direct"
        )
    check_groups(group, "gradients.transport.between flat (between: direct needs none)")


def _between(
    config: FlatConfig | DirectConfig, group: dist.ProcessGroup, members: Sequence[int], rail: int
) -> FlatTransport | DirectTransport:
    """Choose the transport of one rail."""
    if isinstance(config, DirectConfig):
        return DirectTransport(config, group, members, 2 * TAGS * rail)
    world = dist.get_process_group_ranks(group)
    inside = [world[rank] for rank in members]
    made = new_group(inside, like=group, members_alone=True)
    assert made is not None
    return FlatTransport(config, made)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor as parts of at most `PART` bytes; an empty one is one part."""
    parts: Sequence[torch.Tensor] = tensor.view(-1).split(max(PART // tensor.itemsize, 1))
    return parts
