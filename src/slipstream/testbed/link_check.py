"""Measure the links of a testbed from node 0, by TCP connections of ``_link_probe.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import TestbedError
from slipstream.testbed.network import Node

TOLERANCE = 0.15
_PROBE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("_link_probe.py")))
# Divided among both directions to all peers. The first quarter of each share is warm-up: token
# buckets start full, and TCP's window has to grow.
_SECONDS, _LEAST_SECONDS = 1.0, 0.06

StartProcess = Callable[..., subprocess.Popen[Any]]
"""``Testbed.popen``."""


@dataclass(frozen=True)
class LinkCheck:
    """Bits per second of TCP payload from node 0 to ``node`` and back; round trip in seconds."""

    node: Node
    there: float
    back: float
    round_trip: float

    def off(self, rate: int) -> float:
        """Relative error of the worse direction against ``rate``.

        Ethernet, IP and TCP headers take 4 to 5 percent of a perfect link.

        Example:
            >>> node = Node(1, "node1", "198.18.0.2")
            >>> round(LinkCheck(node, 0.8e9, 0.95e9, 1e-4).off(10**9), 3)
            0.2
        """
        return max(abs(measured / rate - 1) for measured in (self.there, self.back))


def check_links(nodes: tuple[Node, ...], popen: StartProcess) -> list[LinkCheck]:
    """Measure between the first node and each other one, one after the other.

    Raises:
        TestbedError: the client failed.
    """
    first, *peers = nodes
    if not peers:
        return []
    share = max(_SECONDS / (2 * len(peers)), _LEAST_SECONDS)
    times = [str(share / 4), str(share * 3 / 4)]
    servers = [popen(peer, [*_PROBE, "serve", peer.address, *times]) for peer in peers]
    try:
        addresses = ",".join(peer.address for peer in peers)
        client = popen(first, [*_PROBE, "measure", addresses, *times], stdout=subprocess.PIPE)
        measured, _ = client.communicate()
    finally:
        for server in servers:
            server.kill()
            server.wait()
    if client.returncode:
        raise TestbedError(
            f"measuring on node 0 failed with code {client.returncode}; its error is above"
        )
    return [LinkCheck(p, **m) for p, m in zip(peers, json.loads(measured), strict=True)]
