"""The network of a testbed as data: hosts, and the ``ip`` and ``tc`` lines that create them.

``_keeper.py`` runs the lines.

    node0 [eth0]--veth--[port0]         [port1]--veth--[eth0] node1
                               \\       /
                                bridge      (in the namespace of the keeper, its process 1)

A token bucket (``tbf``) on ``eth0`` shapes what a node sends, one on its port what it receives. On
a long line a program (``_switch.py``) takes the place of the bridge.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.errors import TestbedError

MOST_NODES = 64
INTERFACE = "eth0"
# A bucket holds what the link carries in a millisecond: enough to keep the rate between two ticks
# of the kernel's timer, and little beside a message. It also holds a packet as TCP hands it down,
# up to 64 KB, if the link carries that in a few milliseconds: otherwise the kernel segments each
# packet, which takes five times the CPU and 15 % of the rate.
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
    """The lines of ``ip -batch`` and ``tc -batch`` that set up a network namespace.

    ``plug`` are lines of ``ip`` to run after the switch is up, ``settings`` those of the kernel in
    ``net.ipv4``. ``plain`` are interfaces that send frames as they are on a cable, and not larger
    ones for the kernel to cut.
    """

    name: str
    ip: list[str]
    tc: list[str]
    plug: list[str]
    plain: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Distance:
    """The way of packets from host to host, beside its rate.

    Attributes:
        round_trip: seconds there and back.
        loss: share of the packets that are lost, each way.
        keeps_window: hosts go on at the speed that a connection has reached before it was idle, as
            those on long lines are set (``net.ipv4.tcp_slow_start_after_idle=0``).
    """

    round_trip: float = 0.0
    loss: float = 0.0
    keeps_window: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.round_trip <= 10:
            raise TestbedError(f"round trip {self.round_trip:g} s; allowed: 0 to 10 s")
        if not 0 <= self.loss < 1:
            raise TestbedError(f"loss {self.loss:g}; allowed: 0 to less than 1, or 0% to 99%")

    @property
    def is_long(self) -> bool:
        """Whether packets are late, or lost."""
        return self.round_trip > 0 or self.loss > 0


@dataclass(frozen=True)
class NetworkPlan:
    """Namespaces to set up, the hosts before the switch, and the text of ``/etc/hosts``.

    ``program`` are the arguments of the switch, where it is one: delay, loss and ports.
    """

    hosts: list[Namespace]
    switch: Namespace
    names: str
    program: list[str]


def make_nodes(count: int) -> tuple[Node, ...]:
    """``count`` hosts with addresses of the range for benchmarks (RFC 2544), 198.18.0.0/15.

    Raises:
        TestbedError: ``count`` is out of range.

    Example:
        >>> [(node.name, node.address) for node in make_nodes(2)]
        [('node0', '198.18.0.1'), ('node1', '198.18.0.2')]
    """
    if not 1 <= count <= MOST_NODES:
        raise TestbedError(f"{count} nodes: a testbed has 1 to {MOST_NODES}")
    return tuple(Node(i, f"node{i}", f"198.18.0.{i + 1}") for i in range(count))


def plan(nodes: tuple[Node, ...], rate: int, distance: Distance) -> NetworkPlan:
    """Namespaces for ``nodes`` on one switch, every link at ``rate`` bits per second both ways.

    The switch of a testbed is in a namespace, too, so that names and addresses cannot clash with
    those of another testbed or of the machine.
    """
    ports = [f"port{node.index}" for node in nodes]
    hosts = [_host(node, port, rate, distance) for node, port in zip(nodes, ports, strict=True)]
    program: list[str] = []
    if distance.is_long:
        ip = [f"link set {port} up" for port in ports]
        program = [str(distance.round_trip / 2), str(distance.loss), *ports]
    else:
        ip = ["link add bridge type bridge", "link set bridge up"]
        ip += [f"link set {port} master bridge up" for port in ports]
    switch = Namespace("switch", ip, [shape(port, rate) for port in ports], plug=[])
    names = {"127.0.0.1": "localhost"} | {node.address: node.name for node in nodes}
    # Also IPv4-mapped IPv6 addresses: torch warns if those have no name.
    lines = [f"{address} {name}\n::ffff:{address} {name}-ipv6\n" for address, name in names.items()]
    return NetworkPlan(hosts, switch, "".join(lines), program)


def _host(node: Node, port: str, rate: int, distance: Distance) -> Namespace:
    ip = [
        "link set lo up",
        # The other end moves to the switch, which is in the namespace of process 1.
        f"link add {node.interface} type veth peer name {port} netns 1",
        f"address add {node.address}/24 dev {node.interface}",
    ]
    # The port must be up before the host's end, so that the bridge learns of the carrier at once.
    # In the other order the kernel may delay that event by a second, and first packets are lost.
    plug = [f"link set {node.interface} up"]
    settings = {"tcp_slow_start_after_idle": "0"} if distance.keeps_window else {}
    plain = [node.interface] if distance.is_long else []
    return Namespace(node.name, ip, [shape(node.interface, rate)], plug, plain, settings)


def shape(interface: str, rate: int) -> str:
    """The line of ``tc`` that limits what leaves ``interface`` to ``rate`` bits per second."""
    packets = min(rate / 8 * PACKET_SECONDS, PACKET_BURST)
    burst = round(max(rate / 8 * BURST_SECONDS, packets, SMALLEST_BURST))
    return f"qdisc add dev {interface} root tbf rate {rate}bit burst {burst}b latency 20ms"
