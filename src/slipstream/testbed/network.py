"""The network of a testbed as plain data: hosts, and the ``ip`` and ``tc`` lines that make them.

Never runs anything: ``keeper.py`` carries the plan out.

    node0 [eth0]--veth--[port0]         [port1]--veth--[eth0] node1
                               \\       /
                                bridge      (in the namespace of the keeper, its process 1)

A token bucket (``tbf``) at the outgoing side of ``eth0`` shapes what a node sends, one at its port
shapes what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import TestbedError

MOST_NODES = 64
INTERFACE = "eth0"
# A bucket holds what the link carries in a millisecond: enough to keep the rate between wake-ups of
# the kernel's timer, little beside a message. Where a few milliseconds suffice for that it also
# holds a packet as TCP hands it down, up to 64 KB: else the kernel cuts each one up, which takes
# five times the CPU and 15 % of the rate.
BURST_SECONDS, SMALLEST_BURST = 1e-3, 16 * 1024
PACKET_SECONDS, PACKET_BURST = 8e-3, 80 * 1024


@dataclass(frozen=True)
class Node:
    """A host of the testbed; its name resolves to its address on every node."""

    index: int
    name: str
    address: str
    interface: str = INTERFACE


@dataclass(frozen=True)
class Namespace:
    """What a network namespace runs to set itself up: lines of ``ip -batch`` and of ``tc -batch``.

    ``plug`` are lines of ``ip`` for once the switch is on.
    """

    name: str
    ip: list[str]
    tc: list[str]
    plug: list[str]


@dataclass(frozen=True)
class Plan:
    """Namespaces to set up, the hosts before the switch, and the text of ``/etc/hosts``."""

    hosts: list[Namespace]
    switch: Namespace
    names: str


def make_nodes(count: int) -> tuple[Node, ...]:
    """``count`` hosts with addresses of the range for network tests (RFC 2544), 198.18.0.0/15.

    Raises:
        TestbedError: not a number of nodes this network has room for.

    Example:
        >>> [(node.name, node.address) for node in make_nodes(2)]
        [('node0', '198.18.0.1'), ('node1', '198.18.0.2')]
    """
    if not 1 <= count <= MOST_NODES:
        raise TestbedError(f"{count} nodes asked for; a testbed has 1 to {MOST_NODES}")
    return tuple(Node(i, f"node{i}", f"198.18.0.{i + 1}") for i in range(count))


def plan(nodes: tuple[Node, ...], rate: int) -> Plan:
    """Namespaces for ``nodes`` on one switch, every link at ``rate`` bits per second both ways.

    Each testbed has a switch of its own in a namespace of its own: neither names nor addresses can
    clash with those of another testbed or of the machine.
    """
    ports = [f"port{node.index}" for node in nodes]
    return Plan(
        hosts=[_host(node, port, rate) for node, port in zip(nodes, ports, strict=True)],
        switch=_switch(ports, rate),
        names=_names(nodes),
    )


def _names(nodes: tuple[Node, ...]) -> str:
    """``/etc/hosts``, with addresses in IPv6 form too: torch warns where those have no name."""
    names = {"127.0.0.1": "localhost"} | {node.address: node.name for node in nodes}
    return "".join(
        f"{address} {name}\n::ffff:{address} {name}-ipv6\n" for address, name in names.items()
    )


def _host(node: Node, port: str, rate: int) -> Namespace:
    ip = [
        "link set lo up",
        # The far end goes to the switch: the namespace of process 1, as the hosts see it.
        f"link add {node.interface} type veth peer name {port} netns 1",
        f"address add {node.address}/24 dev {node.interface}",
    ]
    # The port must be up before the host's end: then the bridge hears of the carrier at once. The
    # other way round the kernel may keep the news for a second, and the first packets are lost.
    plug = [f"link set {node.interface} up"]
    return Namespace(node.name, ip, [shape(node.interface, rate)], plug)


def _switch(ports: list[str], rate: int) -> Namespace:
    ip = ["link add bridge type bridge", "link set bridge up"]
    ip += [f"link set {port} master bridge up" for port in ports]
    return Namespace("switch", ip, [shape(port, rate) for port in ports], plug=[])


def shape(interface: str, rate: int) -> str:
    """The line of ``tc`` that holds what leaves ``interface`` to ``rate`` bits per second."""
    packets = min(rate / 8 * PACKET_SECONDS, PACKET_BURST)
    burst = round(max(rate / 8 * BURST_SECONDS, packets, SMALLEST_BURST))
    return f"qdisc add dev {interface} root tbf rate {rate}bit burst {burst}b latency 20ms"
