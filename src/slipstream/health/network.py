"""Network interfaces and connections of this network namespace, from ``/proc/net`` and ``/sys``."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address

from slipstream.health.facts import ANNOUNCING, InterfaceKind, NetworkInterface
from slipstream.health.files import HostFiles

NET = "sys/class/net"
MEGABIT = 1e6
ESTABLISHED = "01"
_KINDS: dict[str, InterfaceKind] = {
    "bonding": "bond",
    "bridge": "bridge",
    "tun_flags": "tunnel",
    "device": "physical",
}
"""What the folder of an interface has, by kind."""


def read_interfaces(files: HostFiles) -> tuple[NetworkInterface, ...]:
    """Read the interfaces of this network namespace."""
    names = sorted(_received(files))
    addresses = _addresses(files)
    own = _sys_is_ours(files)
    return tuple(_interface(files, name, tuple(addresses.get(name, ())), own) for name in names)


def default_route(files: HostFiles) -> str:
    """The interface of the default route with the smallest metric; empty: there is none."""
    routes = [fields for fields in _routes(files) if fields[1] == fields[7] == "00000000"]
    return min(routes, key=lambda fields: int(fields[6]))[0] if routes else ""


def connections(files: HostFiles) -> set[tuple[str, str, int]]:
    """This process's established connections: local address, that of the peer, its port."""
    inodes = set()
    folder = files.root / "proc/self/fd"
    for name in files.names("proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(folder / name).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in files.text(f"proc/self/net/{table}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == ESTABLISHED and fields[9] in inodes:
                (local, _), (peer, port) = (end.split(":") for end in fields[1:3])
                found.add((readable_address(local), readable_address(peer), int(port, 16)))
    return found


def readable_address(hexadecimal: str) -> str:
    """Translate an address of the kernel's tables: words of 4 bytes, each reversed.

    Example:
        >>> readable_address("0100007F")
        '127.0.0.1'
        >>> readable_address("0000000000000000FFFF00000100007F")
        '127.0.0.1'
    """
    data = bytes.fromhex(hexadecimal)
    words = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    if len(words) == 4:
        return str(IPv4Address(words))
    return str(IPv6Address(words).ipv4_mapped or IPv6Address(words))


def _interface(
    files: HostFiles, name: str, addresses: tuple[str, ...], own: bool
) -> NetworkInterface:
    folder = f"{NET}/{name}"
    # /proc/sys is always that of this namespace, and IPv6 has the MTU of the device
    mtu = files.number(f"{folder}/mtu" if own else f"proc/sys/net/ipv6/conf/{name}/mtu")
    if not own:
        kind: InterfaceKind | None = "loopback" if name == "lo" else None
        return NetworkInterface(name=name, addresses=addresses, kind=kind, mtu=mtu)
    traits = (kind for trait, kind in _KINDS.items() if files.exists(f"{folder}/{trait}"))
    kind = next(traits, "virtual")
    if files.text(f"{folder}/type") == "772":
        kind = "loopback"
    elif files.exists(f"proc/self/net/vlan/{name}"):
        kind = "vlan"
    speed = files.number(f"{folder}/speed")
    announced = speed is not None and speed > 0 and kind in ANNOUNCING
    return NetworkInterface(
        name=name,
        addresses=addresses,
        kind=kind,
        up=files.text(f"{folder}/operstate") in ("up", "unknown"),
        mtu=mtu,
        speed=speed * MEGABIT if announced and speed is not None else None,
    )


def _sys_is_ours(files: HostFiles) -> bool:
    """Whether ``/sys`` shows this network namespace: it is that of the process that mounted it.

    The counters tell: those of /sys lie between two looks at those of this namespace.
    """
    before = _received(files)
    seen = {name: files.number(f"{NET}/{name}/statistics/rx_bytes") for name in before}
    after = _received(files)
    devices = {name for name in files.names(NET) if files.exists(f"{NET}/{name}/ifindex")}
    return devices == before.keys() == after.keys() and all(
        count is not None and before[name] <= count <= after[name] for name, count in seen.items()
    )


def _received(files: HostFiles) -> dict[str, int]:
    """Bytes that each interface has received."""
    rows = re.findall(r"^\s*([^\s|]+):\s*(\d+)", files.text("proc/self/net/dev"), re.MULTILINE)
    return {name: int(count) for name, count in rows}


def _addresses(files: HostFiles) -> dict[str, list[str]]:
    """Addresses by interface."""
    found: dict[str, list[str]] = {}
    networks = [
        (IPv4Network((readable_address(fields[1]), readable_address(fields[7]))), fields[0])
        for fields in _routes(files)
        if fields[7] != "00000000"
    ]
    networks.sort(key=lambda network: -network[0].prefixlen)
    networks.append((IPv4Network("127.0.0.0/8"), "lo"))
    local = r"\|-- ([\d.]+)\n\s+/32 host LOCAL"
    for text in dict.fromkeys(re.findall(local, files.text("proc/self/net/fib_trie"))):
        for network, name in networks:
            if IPv4Address(text) in network:
                found.setdefault(name, []).append(text)
                break
    for line in files.text("proc/self/net/if_inet6").splitlines():
        hexadecimal, *_, name = line.split()
        address = IPv6Address(bytes.fromhex(hexadecimal))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


def _routes(files: HostFiles) -> list[list[str]]:
    """Fields of the IPv4 routes: interface, destination, ..., metric (6), mask (7)."""
    lines = files.text("proc/self/net/route").splitlines()[1:]
    return [fields for fields in map(str.split, lines) if len(fields) > 7]
