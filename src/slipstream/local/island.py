"""Islands: ranks that average gradients at every update, and meet the others as one.

A rank by itself is an island, or, with transport ``hierarchical``, all ranks of a host. The first
rank of an island meets for it, and hands on to the others what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slipstream.cluster.connect import Cluster
from slipstream.codecs import Ranks
from slipstream.parallel.dims import ParallelDims
from slipstream.strategy import FlatConfig, HierarchicalConfig, TransportConfig
from slipstream.transport.consistency import collective_errors
from slipstream.transport.flat import FlatTransport
from slipstream.transport.hosts import find_hosts
from slipstream.transport.requests import AllReduce, Broadcast, Request


@dataclass(frozen=True, slots=True)
class Island:
    """The ranks among which this one is never alone.

    Attributes:
        ranks: of this island, among those that share the data.
        islands: this one among all of them.
        groups: of its ranks: one for single collectives, one for those of several steps, and one
            for CPU tensors; none where a rank is by itself.
        leaders: the first ranks of all islands; None: this rank is none, or there is one island.
    """

    ranks: tuple[int, ...]
    islands: Ranks
    groups: Sequence[dist.ProcessGroup] = ()
    leaders: dist.ProcessGroup | None = None

    @property
    def name(self) -> str:
        """Its ranks, for a message."""
        return ("ranks " if len(self.ranks) > 1 else "rank ") + ", ".join(map(str, self.ranks))

    @property
    def meets(self) -> bool:
        """Whether this rank exchanges changes with other islands."""
        return self.leads and self.islands.count > 1

    @property
    def leads(self) -> bool:
        """Whether this rank meets for its island."""
        return not self.groups or dist.get_rank(self.groups[0]) == 0

    def average(self, values: torch.Tensor) -> None:
        """Average ``values``, which ranks of the island have apart from each other."""
        if self.groups and len(values):
            self._carry_out(AllReduce(values))
            values /= len(self.ranks)

    def hand_on(self, values: torch.Tensor) -> None:
        """Let all ranks of the island have the first one's ``values``."""
        if self.groups and len(values):
            self._carry_out(Broadcast(values))

    def _carry_out(self, request: Request) -> None:
        with collective_errors("a meeting within a host"):
            for work in FlatTransport(FlatConfig(), self.groups[0]).start(request):
                work.wait()


def find_island(cluster: Cluster, dims: ParallelDims, config: TransportConfig) -> Island:
    """Find the ranks that this one averages gradients with at every update. Collective.

    Raises:
        ClusterError: ranks of a host reach each other only in part.
    """
    own = Ranks(dims.data_rank, dims.data_size)
    if dims.data is None or not isinstance(config, HierarchicalConfig):
        return Island((own.rank,), own, leaders=dims.new_data_group())
    hosts = find_hosts(dims.data, 1)
    hosts.close()
    number = next(i for i, node in enumerate(hosts.nodes) if own.rank in node)
    made: list[dist.ProcessGroup] = []
    for node in hosts.nodes:  # torch demands that every rank makes all groups
        if len(node) > 1:
            groups = [cluster.new_group(node, backend) for backend in (None, None, "gloo")]
            made += [group for group in groups if group is not None]
    first = [node[0] for node in hosts.nodes]
    leaders = cluster.new_group(first) if len(first) > 1 else None
    return Island(hosts.nodes[number], Ranks(number, len(first)), made, leaders)


def between(config: TransportConfig) -> TransportConfig:
    """The transport that carries changes from island to island."""
    if isinstance(config, HierarchicalConfig):
        return config.between
    return config
