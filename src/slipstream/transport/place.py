"""The places of ranks, as far as the choice of a transport depends on them."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from slipstream.errors import ClusterError, MismatchError
from slipstream.transport.hosts import find_hosts


class Place(NamedTuple):
    """The device of the tensors that travel, and the ranks of each host.

    Example:
        >>> place = Place(torch.device("cpu"), ((0, 1), (2, 3)))
        >>> place.one_host, place.shares_hosts
        (False, True)
    """

    device: torch.device
    nodes: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.nodes) == 1

    @property
    def shares_hosts(self) -> bool:
        """Whether a host has several ranks."""
        return max(map(len, self.nodes)) > 1

    @classmethod
    def apart(cls, device: torch.device, ranks: int) -> Place:
        """Each rank on a host of its own: what nobody needs to be asked about."""
        return cls(device, tuple((rank,) for rank in range(ranks)))


def find_place(device: torch.device, group: dist.ProcessGroup) -> Place:
    """Find out which ranks share a host. Collective.

    Where that fails, each rank counts as a host of its own, and the first rank says why.

    Args:
        device: of the tensors that travel.
        group: a group of CPU tensors.

    Raises:
        ExchangeError: another rank is gone.
    """
    try:
        hosts = find_hosts(group, 1)
    except (ClusterError, MismatchError) as error:
        if dist.get_rank(group) == 0:
            print(f"slipstream: each rank counts as a host of its own: {error}", file=sys.stderr)
        return Place.apart(device, dist.get_world_size(group))
    hosts.close()
    return Place(device, hosts.nodes)
