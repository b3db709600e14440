"""Which ranks share a host, and sockets between those that do.

[Note: A name on the host]
Every rank binds a random name among the host's abstract Unix sockets and tells it to all others.
Who reaches it shares the host: the kernel says so, not ``LOCAL_WORLD_SIZE`` (one host may run two
launchers) nor the host's name (containers share names). These names belong to the network
namespace, so ranks of one host also share its links. No file is made, and the kernel drops the name
with the process: a kill leaves nothing behind.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from slipstream.errors import ClusterError
from slipstream.transport.consistency import agree, collective_errors

HELLO_SECONDS = 30.0
"""For the first bytes of a rank that has connected; they are sent before anyone waits for them."""

_HELLO = struct.Struct("=16sII")  # the secret of the rank called, the caller's rank, the line


@dataclass(frozen=True, slots=True)
class Rails:
    """The ways between hosts, as many as the largest host has ranks.

    A rail is one rank of each host: the one with the rail's number modulo the host's number of
    ranks as its local index.

    Attributes:
        members: ranks of the group, by rail and host.
        own: the rails of this rank; at least one.
        host: of this rank, as all rails count it.

    Example:
        >>> Rails.of([[0, 2], [1, 3]], rank=3)
        Rails(members=((0, 1), (2, 3)), own=(1,), host=1)
        >>> Rails.of([[0, 1, 2], [3, 4], [5]], rank=3)
        Rails(members=((0, 3, 5), (1, 4, 5), (2, 3, 5)), own=(0, 2), host=1)
    """

    members: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    host: int

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], rank: int) -> Rails:
        """Find the rails of ``rank``; ``nodes``: ranks by host."""
        count = max(map(len, nodes))
        members = tuple(tuple(node[rail % len(node)] for node in nodes) for rail in range(count))
        own = tuple(rail for rail, ranks in enumerate(members) if rank in ranks)
        return cls(members, own, members[own[0]].index(rank))

    @property
    def num_hosts(self) -> int:
        """The ranks of each rail."""
        return len(self.members[0])


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a group's ranks.

    Attributes:
        nodes: ranks of the group by host, ascending; hosts in the order of their first ranks.
        rank: this rank.
        lines: sockets to the other ranks of this host, as often as was asked for.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    lines: Sequence[Mapping[int, socket.socket]]

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this host, this one included."""
        return next(node for node in self.nodes if self.rank in node)

    def close(self) -> None:
        """Close all connections."""
        for line in self.lines:
            for peer in line.values():
                peer.close()


def find_hosts(group: dist.ProcessGroup, lines: int) -> Hosts:
    """Find out which ranks share a host, and connect these with each other. Collective.

    Args:
        group: a group of CPU tensors.
        lines: connections between every two ranks of a host.

    Raises:
        ClusterError: ranks reach each other only in part, or this rank fails to connect.
        MismatchError: another rank raised an error here.
        ExchangeError: another rank is gone.
    """
    rank, name, secret = dist.get_rank(group), secrets.token_bytes(16), secrets.token_bytes(16)
    error: Exception | None = None
    nodes: list[tuple[int, ...]] = []
    connected: list[dict[int, socket.socket]] = [{} for _ in range(lines)]
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(_address(name))
        listener.listen(socket.SOMAXCONN)  # nobody answers before all have called
        cards = _gathered((name, secret), group)
        try:
            _call(cards[:rank], rank, connected)
        except OSError as failure:
            error = _unreachable(rank, failure)
        reached = _gathered((*connected[0], rank), group)  # the lower ranks alone
        try:
            nodes = _nodes(reached)
            callers = [r for r in range(rank + 1, len(cards)) if rank in reached[r]]
            _answer(listener, secret, callers, connected)
        except OSError as failure:
            error = error or _unreachable(rank, failure)
        except ClusterError as failure:
            error = error or failure
    agree({"hosts": str(nodes)}, group, error)
    return Hosts(tuple(nodes), rank, connected)


def _address(name: bytes) -> str:
    return f"\0slipstream-{name.hex()}"


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values = [None] * dist.get_world_size(group)
    with collective_errors("the search for ranks on this host"):
        dist.all_gather_object(values, value, group=group)
    return values


def _call(
    cards: Sequence[tuple[bytes, bytes]], rank: int, connected: Sequence[dict[int, socket.socket]]
) -> None:
    """Connect to each rank of ``cards`` that can be reached."""
    for peer, (name, secret) in enumerate(cards):
        for number, line in enumerate(connected):
            called = socket.socket(socket.AF_UNIX)
            called.settimeout(HELLO_SECONDS)  # where too many strangers call the same rank
            try:
                called.connect(_address(name))
            except ConnectionRefusedError:  # nobody on this host has that name
                called.close()
                break
            called.sendall(_HELLO.pack(secret, rank, number))
            called.settimeout(None)
            line[peer] = called


def _answer(
    listener: socket.socket,
    secret: bytes,
    callers: Sequence[int],
    connected: Sequence[dict[int, socket.socket]],
) -> None:
    """Accept the connections of ``callers``; others, which do not know the secret, are dropped."""
    listener.settimeout(HELLO_SECONDS)
    missing = {(caller, number) for caller in callers for number in range(len(connected))}
    while missing:
        caller, _ = listener.accept()
        caller.settimeout(HELLO_SECONDS)
        try:
            hello = caller.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:  # a stranger that is silent, or has left
            hello = b""
        known, peer, number = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
        if not secrets.compare_digest(known, secret) or (peer, number) not in missing:
            caller.close()
            continue
        caller.settimeout(None)
        connected[number][peer] = caller
        missing.remove((peer, number))


def _nodes(reached: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Ranks by host from what each rank reached of the ranks below it, and itself.

    Raises:
        ClusterError: reaching is not mutual among the ranks of a host.

    Example:
        >>> _nodes([[0], [1], [0, 2], [1, 3]])
        [(0, 2), (1, 3)]
        >>> _nodes([[0], [0, 1], [1, 2]])
        Traceback (most recent call last):
        slipstream.errors.ClusterError: ranks [1, 2] reach each other on a host only in part: ...
    """
    nodes: dict[int, list[int]] = {}
    for rank, lower in enumerate(reached):
        node = nodes.setdefault(min(lower), [])
        if sorted(lower) != [*node, rank]:
            others = sorted({*lower, *node} - {rank})
            raise ClusterError(
                f"ranks {[*others, rank]} reach each other on a host only in part: give all ranks "
                "of a host one network namespace, or each of them its own"
            )
        node.append(rank)
    return [tuple(node) for node in nodes.values()]


def _unreachable(rank: int, error: OSError) -> ClusterError:
    return ClusterError(
        f"rank {rank} cannot connect to the ranks of its host by Unix sockets "
        f"({os.strerror(error.errno) if error.errno else error}); write gradients: {{transport: "
        "direct}, which needs none"
    )
