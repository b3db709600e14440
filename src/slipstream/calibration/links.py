"""Links between hosts: who reaches whom, how fast, and how far clocks are apart, by gloo.

One process of each host takes part. They meet in a store alone: a process group of all would not
come about where two hosts do not reach each other. Each pair makes a group of its own.

[Note: Turns]
As in a tournament, each host is in one pair at a time, and all meet all in n - 1 turns. A pair
begins when both have said in the store that they are there, so one that waits for a firewall delays
those that come after it, and no wait of theirs ends early.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from itertools import combinations
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from slipstream.health.cluster_checks import slow_links
from slipstream.health.facts import ClusterFacts, HostFacts, HostLink
from slipstream.health.files import HostFiles
from slipstream.health.host_checks import gloo_address
from slipstream.health.network import connections

CONNECT_SECONDS = 5.0
"""For a connection: a firewall that drops packets answers nothing."""
MESSAGE_SECONDS = 15.0
"""For a message: one that takes longer will not arrive."""
COME_SECONDS = 120.0
"""For another host that is still busy with others."""
ROUND_TRIPS = 20
SMALLEST, LARGEST = 2**18, 2**26
"""Bytes of a message; they double."""
LEAST_MESSAGES = 3
LOOKS = 3
"""At a link that seems slow: one whose hosts are busy with something else is slow now and then."""


def measure_links(
    store: Store, place: int, hosts: Sequence[HostFacts], seconds: float = 1.0
) -> tuple[HostLink, ...]:
    """Measure the links between all hosts; on all of them at the same time.

    A link that looks slow is measured again, up to twice, and the best figure counts. Ends in a
    bounded time: a host that does not come or does not answer becomes the ``error`` of its links.

    Args:
        store: which all have reached.
        place: of this host among ``hosts``.
        hosts: the facts of all, in the same order everywhere.
        seconds: for each link, about.

    Returns:
        The links, the same on all hosts.
    """
    with ExitStack() as cleanup:
        own = _listen(hosts[place])
        if own is not None:
            cleanup.enter_context(own)
        store.set(f"door/{place}", ":".join(map(str, own.getsockname()[:2])) if own else "")
        doors = [_get(store, f"door/{other}") or "" for other in range(len(hosts))]
        prober = _Prober(place, hosts, doors, seconds)
        pairs = [*combinations(range(len(hosts)), 2)]
        best = dict(zip(pairs, prober.links(PrefixStore("0", store), pairs), strict=True))
        for look in range(1, LOOKS):
            slow = slow_links(ClusterFacts(hosts=tuple(hosts), links=tuple(best.values())))
            again = [pair for pair, link in best.items() if link in slow]
            for pair, link in zip(
                again, prober.links(PrefixStore(str(look), store), again), strict=True
            ):
                best[pair] = max(best[pair], link, key=lambda one: one.rate)
    return tuple(best.values())


@dataclass(frozen=True)
class _Prober:
    """The part of one host in the measurement."""

    place: int
    hosts: Sequence[HostFacts]
    doors: Sequence[str]
    seconds: float

    def links(self, store: Store, pairs: Sequence[tuple[int, int]]) -> tuple[HostLink, ...]:
        """Measure some pairs; returns the links of all of them, in their order."""
        for pair in (pair for turn in turns(len(self.hosts)) for pair in turn if pair in pairs):
            if self.place in pair:
                link = self._link(PrefixStore("{}-{}".format(*pair), store), pair)
                if self.place == pair[0]:
                    store.set("link/{}-{}".format(*pair), link.model_dump_json())
        links = []
        for pair in pairs:
            names = self._names(pair)
            found = _get(store, "link/{}-{}".format(*pair))
            said = f"{names[0]} has not told about its link to {names[1]}"
            lost = HostLink(hosts=names, error=said, failed_at="come")
            links.append(HostLink.model_validate_json(found) if found else lost)
        return tuple(links)

    def _names(self, pair: tuple[int, int]) -> tuple[str, str]:
        return self.hosts[pair[0]].host, self.hosts[pair[1]].host

    def _link(self, store: Store, pair: tuple[int, int]) -> HostLink:
        """Measure the link of this host to one other; complete on the first of the two only."""
        own, peer = pair if self.place == pair[0] else pair[::-1]
        link = HostLink(hosts=self._names(pair))
        store.set(f"here/{own}", "")
        if _get(store, f"here/{peer}") is None:
            late = f"{self.hosts[peer].host} has not come within {COME_SECONDS:.0f} s"
            return link.model_copy(update={"error": late, "failed_at": "come"})
        for end in pair:
            if hidden := reachable(self.doors[end], self.hosts[end].host):
                return link.model_copy(update={"error": hidden, "failed_at": "listen"})
        store.set(f"reached/{own}", knock(self.doors[peer], *self._names((own, peer))))
        if error := _get(store, f"reached/{own}") or _get(store, f"reached/{peer}"):
            return link.model_copy(update={"error": error, "failed_at": "connect"})
        try:
            before = connections(HostFiles())
            side, limit = int(self.place == pair[1]), timedelta(seconds=MESSAGE_SECONDS)
            group = ProcessGroupGloo(store, side, 2, limit)
            opened = sorted(local for local, _, _ in connections(HostFiles()) - before)
            store.set(f"address/{own}", opened[0] if opened else "")
            first, second = (_get(store, f"address/{end}") or "" for end in pair)
            link = link.model_copy(update={"addresses": (first, second)})
            return measure_link(group, self.seconds, link)
        except RuntimeError as error:
            said = re.sub(r"^\[.*?\] ", "", str(error).strip().partition("\n")[0])
            words = "{} and {} connect, but a message does not arrive: ".format(*link.hosts)
            return link.model_copy(update={"error": f"{words}{said}", "failed_at": "message"})


def turns(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of a tournament, turn by turn: nobody is in two pairs of a turn.

    Example:
        >>> [*turns(4)]
        [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
        >>> [*turns(3)]
        [[(0, 1)], [(0, 2)], [(1, 2)]]
    """
    even = count + count % 2
    for turn in range(even - 1):
        # one stays, the others walk around a circle; with an odd count that one is nobody
        circle = [(at - turn) % (even - 1) for at in range(even - 1)]
        row = [even - 1, *circle]
        met = (sorted((row[at], row[even - 1 - at])) for at in range(even // 2))
        yield sorted((a, b) for a, b in met if b < count)


def reachable(door: str, host: str) -> str:
    """Say why other hosts cannot come to where this one listens; empty: they can.

    Example:
        >>> reachable("127.0.0.1:4711", "node1")
        'node1 listens on 127.0.0.1, which no other host reaches'
        >>> reachable("", "node1")
        'node1 has no interface that gloo could listen on'
    """
    address = door.rpartition(":")[0]
    if not address:
        return f"{host} has no interface that gloo could listen on"
    if ip_address(address).is_loopback:
        return f"{host} listens on {address}, which no other host reaches"
    return ""


def knock(door: str, own: str, peer: str) -> str:
    """Connect to the port of another host, and say why that fails; empty: it does not."""
    address, _, port = door.rpartition(":")
    try:
        socket.create_connection((address, int(port)), CONNECT_SECONDS).close()
    except TimeoutError:
        return f"{peer} ({address}) does not answer {own} within {CONNECT_SECONDS:.0f} s"
    except OSError as error:
        return f"{own} cannot connect to {peer} ({address}): {error.strerror}"
    return ""


def measure_link(group: Any, seconds: float, link: HostLink) -> HostLink:
    """Measure a group of two: latency and clocks, then bandwidth one way, and the other.

    Args:
        group: a ``ProcessGroupGloo`` whose rank 0 is the first of the link's hosts.
        seconds: for the two ways together, about; a slow link takes longer, for a few messages.
        link: whose figures are to be filled in.

    Returns:
        The link; latency, clocks and rates are right on rank 0.

    Raises:
        RuntimeError: a message takes longer than the group waits.
    """
    first = group.rank() == 0
    peer, trips = int(first), []
    for _ in range(ROUND_TRIPS):
        stamp = torch.zeros(1, dtype=torch.float64)
        sent = time.time()
        if first:
            group.send([stamp], peer, 0).wait()
            group.recv([stamp], peer, 0).wait()
        else:
            group.recv([stamp], peer, 0).wait()
            group.send([torch.full_like(stamp, time.time())], peer, 0).wait()
        back = time.time()
        trips.append((back - sent, float(stamp) - (sent + back) / 2))
    trip, skew = min(trips)
    there = _rate(group, peer, first, seconds / 2)
    back_again = _rate(group, peer, not first, seconds / 2)
    return link.model_copy(
        update={
            "latency": trip / 2,
            "rates": (there, back_again),
            "skew": skew,
            "skew_error": trip / 2,
        }
    )


def _rate(group: Any, peer: int, sends: bool, seconds: float) -> float:
    """Bits per second of messages that double until one takes a third of the time, on both ends.

    The best of them counts, without the first ones: small messages wait for their way more than
    they travel, or pass in a burst that a switch lets through.
    """
    size, count, told = SMALLEST, 0, torch.zeros(2, dtype=torch.float64)
    rate, since = 0.0, time.perf_counter()
    while size:
        data = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        if sends:
            group.send([data], peer, 1).wait()
            group.recv([torch.zeros(1)], peer, 1).wait()  # it has arrived
            now = time.perf_counter()
            count += 1
            this = size * 8 / (now - began)
            rate = max(rate, this) if count > LEAST_MESSAGES else this
            enough = count >= LEAST_MESSAGES and now - began > seconds / 3
            done = enough or now - since > seconds or size >= LARGEST
            size = 0 if done else min(2 * size, LARGEST)
            group.send([torch.tensor([size, rate], dtype=torch.float64)], peer, 1).wait()
        else:
            group.recv([data], peer, 1).wait()
            group.send([torch.zeros(1)], peer, 1).wait()
            group.recv([told], peer, 1).wait()
            size, rate = int(told[0]), float(told[1])
    return rate


def _listen(facts: HostFacts) -> socket.socket | None:
    """Listen where gloo would, at a free port: the kernel answers there. None: there is nowhere."""
    address = gloo_address(facts)
    if not address:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def _get(store: Store, key: str) -> str | None:
    """A value of the store; None: nobody sets it in time."""
    try:
        store.wait([key], timedelta(seconds=COME_SECONDS))
    except RuntimeError:
        return None
    return store.get(key).decode()
