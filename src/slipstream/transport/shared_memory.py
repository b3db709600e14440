"""The shared-memory transport: ranks of one host sum tensors in memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from slipstream.cluster.groups import timeout_of
from slipstream.errors import ClusterError
from slipstream.strategy import FlatConfig, SharedMemoryConfig
from slipstream.transport.flat import FlatTransport
from slipstream.transport.host_memory import share_memory
from slipstream.transport.host_pipeline import ChunkPipeline, ChunkStage
from slipstream.transport.host_shares import Cut, HostSum
from slipstream.transport.hosts import find_hosts
from slipstream.transport.requests import AllReduce, Request
from slipstream.transport.work import ThreadWork, Work


class SharedMemoryTransport:
    """All-reduces through memory that all ranks share; all else as ``flat`` does it.

    Sums in rank order, those of 16-bit floats in float32: the same bits on all ranks and in every
    run. Exactness: reordered; bitwise on two ranks.

    Raises:
        ClusterError: the ranks are not all on one host, or it gives no memory.
    """

    def __init__(self, config: SharedMemoryConfig, group: dist.ProcessGroup) -> None:
        self._flat = FlatTransport(FlatConfig(), group)
        hosts = find_hosts(group, 1)
        if len(hosts.nodes) > 1:
            hosts.close()
            raise ClusterError(
                f"gradients.transport shared_memory needs all ranks on one host; by host they are "
                f"{[list(node) for node in hosts.nodes]}; write gradients: {{transport: "
                "hierarchical}"
            )
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._owners = 1 if self._ranks == 2 else self._ranks
        [self._memory] = share_memory(hosts, self._owners, [0], [self._ranks], group)
        timeout, stages = timeout_of(group).total_seconds(), 2 if self._ranks == 2 else 3
        slots = self._memory.slots
        self._pipeline = ChunkPipeline(hosts.lines[0], stages, slots, timeout, lambda _: None)

    def prepare(self, requests: Sequence[Request]) -> None:
        """Nothing to do: a row is there before the tensor is."""

    def start(self, request: Request) -> Sequence[Work]:
        if not isinstance(request, AllReduce):
            return self._flat.start(request)
        cut, work = Cut.even(request.tensor, self._owners, self._memory.chunk), ThreadWork()
        shares = HostSum(cut, self._memory.blocks(cut), self._ranks, self._rank)
        stages: Sequence[ChunkStage] = (shares.put, shares.add_and_give, shares.take)
        if self._ranks == 2:
            stages = shares.put_all, shares.add_two
        self._pipeline.submit(stages, cut.num_chunks, work.complete)
        return [work]

    def close(self) -> None:
        self._pipeline.close()
        self._memory.free()
