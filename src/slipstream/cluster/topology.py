"""Which ranks share a host, computed from the hosts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_by_host(hosts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Ranks of each host, where ``hosts[rank]`` is the host of a rank.

    Hosts are ordered by their lowest rank; their ranks ascend.

    Example:
        >>> ranks_by_host(["a", "b", "a"])
        {'a': (0, 2), 'b': (1,)}
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return {host: tuple(members) for host, members in ranks.items()}
