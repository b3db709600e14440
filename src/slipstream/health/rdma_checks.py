"""Checks of hosts with RDMA devices: InfiniBand and RoCE."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slipstream.health.diagnosis import Verdict, health_check
from slipstream.health.facts import HostFacts, RdmaDevice, RdmaPort

FULL_MTU = 4096
ROCE_FRAME = 4200
"""MTU of an Ethernet interface that carries RDMA packets of 4096 bytes."""
LEAST_TIMEOUT, LEAST_RETRIES = 20, 7
"""Defaults of NCCL; a smaller one ends runs that would have gone on."""


def _ports(facts: HostFacts) -> Iterator[tuple[str, RdmaDevice, RdmaPort]]:
    for device in facts.rdma:
        for port in device.ports:
            yield f"{device.name}:{port.number}", device, port


def _active(facts: HostFacts) -> list[tuple[str, RdmaDevice, RdmaPort]]:
    return [(name, device, port) for name, device, port in _ports(facts) if port.state == "ACTIVE"]


def _is_roce(port: RdmaPort) -> bool:
    return port.link_layer == "Ethernet"


@health_check(
    "RDMA",
    reads="`/sys/class/infiniband`, `NCCL_IB_DISABLE` (environment, `/etc/nccl.conf`, "
    "`$NCCL_CONF_FILE`, `~/.nccl.conf`)",
    healthy="no device, or NCCL_IB_DISABLE is not 1",
    effect="1: NCCL leaves the RDMA devices alone and takes TCP",
    fix="unset NCCL_IB_DISABLE",
)
def rdma(facts: HostFacts) -> Iterator[Verdict]:
    """Judge whether NCCL may use the RDMA devices."""
    if not facts.rdma:
        yield Verdict("ok", "no RDMA device")
        return
    names = ", ".join(device.name for device in facts.rdma)
    if facts.setting("NCCL_IB_DISABLE") not in ("", "0"):
        yield Verdict("wrong", f"{facts.quoted('NCCL_IB_DISABLE')}, but there is {names}")
    else:
        yield Verdict("ok", names)


@health_check(
    "RDMA device names",
    reads="`NCCL_IB_HCA`, `/sys/class/infiniband`",
    healthy="every name of NCCL_IB_HCA is a device",
    effect='a name without a device: "No device found", or fewer lanes than there are',
    fix="unset NCCL_IB_HCA, or name devices that are there",
)
def hca(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the devices that NCCL is told to take."""
    value = facts.setting("NCCL_IB_HCA")
    if not facts.rdma or not value or value.startswith("^"):
        return
    names, exact = [device.name for device in facts.rdma], value.startswith("=")
    wanted = [word.partition(":")[0] for word in value.lstrip("=").split(",")]
    missing = [
        word
        for word in wanted
        if not any(name == word if exact else name.startswith(word) for name in names)
    ]
    devices = ", ".join(names)
    if missing:
        yield Verdict("wrong", f"{facts.quoted('NCCL_IB_HCA')}, but the devices are {devices}")
    else:
        yield Verdict("ok", facts.quoted("NCCL_IB_HCA"))


@health_check(
    "RDMA ports",
    reads="`state`, `rate` and `lid` of `/sys/class/infiniband/*/ports/*`",
    healthy="ACTIVE, all lanes, on InfiniBand a lid",
    effect="DOWN: no cable; INIT or lid 0: no subnet manager; 1X: a quarter of the rate",
    fix="DOWN: plug in the cable or enable the port of the switch; INIT or lid 0: start a subnet "
    "manager (opensm); 1X: clean or replace the cable",
)
def ports(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the state of each port."""
    fine = []
    for name, _, port in _ports(facts):
        if port.state == "DOWN" and _active(facts):
            continue  # the second port of a card often has no cable
        if port.state != "ACTIVE":
            yield Verdict("wrong", f"{name} is {port.state or 'in an unknown state'}")
        elif re.search(r"\(1X", port.rate):
            yield Verdict("wrong", f"{name} runs on one lane: {port.rate}")
        elif port.link_layer == "InfiniBand" and port.lid == 0:
            yield Verdict("wrong", f"{name} has lid 0")
        else:
            fine.append(f"{name} at {port.rate}")
    if fine:
        yield Verdict("ok", ", ".join(fine))


@health_check(
    "RoCE address",
    reads="`NCCL_IB_GID_INDEX`, `gids` and `gid_attrs/types` of `/sys/class/infiniband/*/ports/*`",
    healthy='the index is unset, or one of type "RoCE v2" with an IPv4 address (often 3)',
    effect="a zero, link-local or RoCE v1 address: timeouts between subnets",
    fix="unset NCCL_IB_GID_INDEX; without any such address give the interface an IPv4 address",
)
def gid(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the address that RoCE takes."""
    told = facts.setting("NCCL_IB_GID_INDEX")
    fine, other, without = [], [], []
    for name, _, port in filter(lambda one: _is_roce(one[2]), _active(facts)):
        routable = [str(g.index) for g in port.gids if g.type == "RoCE v2" and ":ffff:" in g.gid]
        if not routable:
            without.append(name)
        elif told in ("", "-1", *routable):
            fine.append(f"{name}: index {told or routable[0]}")
        else:
            other.append(f"{', '.join(routable)} on {name}")
    if without:  # a card that training does not use may have none
        read = f"{', '.join(without)}: no address of RoCE v2 with IPv4"
        yield Verdict("warning" if fine or other else "wrong", read)
    if other:
        quoted = facts.quoted("NCCL_IB_GID_INDEX")
        yield Verdict("wrong", f"{quoted}; RoCE v2 with IPv4 is {'; '.join(other)}")
    if fine:
        yield Verdict("ok", ", ".join(fine))


@health_check(
    "RDMA packet size",
    reads="`active_mtu` of `ibv_devinfo`; for RoCE the MTU of the interface in `/sys/class/net`",
    healthy="4096 bytes; for RoCE an interface of 4200 or more",
    effect="an interface of 1500 bytes: RDMA packets of 1024, more of them",
    fix="ip link set INTERFACE mtu 9000 on all hosts, and on the switch",
)
def rdma_mtu(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the bytes of a packet."""
    fine, mtus = [], {one.name: one.mtu for one in facts.interfaces}
    for name, _, port in _active(facts):
        mtu = mtus.get(port.interface)
        if _is_roce(port) and mtu is not None and mtu < ROCE_FRAME:
            yield Verdict(
                "warning",
                f"{name} sends over {port.interface}, whose MTU is {mtu}",
                f"ip link set {port.interface} mtu 9000 on all hosts, and on the switch",
            )
        elif not _is_roce(port) and port.active_mtu is not None and port.active_mtu < FULL_MTU:
            fix = "set the MTU of the partition in the subnet manager to 4096"
            yield Verdict("warning", f"{name} has an active MTU of {port.active_mtu}", fix)
        else:
            fine.append(name)
    if fine:
        yield Verdict("ok", ", ".join(fine))


@health_check(
    "lossless RoCE",
    reads="`/sys/class/net/*/ecn/roce_*/enable`, `mlnx_qos -i INTERFACE`",
    healthy="one priority is lossless (PFC), or marks congestion (ECN)",
    effect="none: the switch drops packets when several hosts send to one, and they are sent again",
    fix="mlnx_qos -i INTERFACE --pfc 0,0,0,1,0,0,0,0 and the same priority on the switch, with "
    "NCCL_IB_TC=106",
)
def lossless(facts: HostFacts) -> Iterator[Verdict]:
    """Judge whether RoCE loses packets."""
    fine = []
    for name, _, port in filter(lambda one: _is_roce(one[2]), _active(facts)):
        if port.lossless is None:
            yield Verdict(
                "unknown",
                f"{name}: no ECN files, and mlnx_qos cannot be run",
                f"sudo mlnx_qos -i {port.interface} shows it",
            )
        elif port.lossless == 0:
            yield Verdict("warning", f"{name}: no priority with PFC or ECN")
        else:
            fine.append(name)
    if fine:
        yield Verdict("ok", ", ".join(fine))


@health_check(
    "RDMA errors",
    reads="`counters`, `hw_counters` of `/sys/class/infiniband/*/ports/*`, twice in half a second",
    healthy="no error counter grows",
    effect="one grows: a bad cable, or packets that are dropped and sent again",
    fix="symbol_error, link_downed, port_rcv_errors: clean or replace the cable; the others: make "
    "RoCE lossless on the host and the switch",
)
def errors(facts: HostFacts) -> Iterator[Verdict]:
    """Judge counters that should stand still."""
    for name, _, port in _ports(facts):
        if port.grown:
            grown = ", ".join(f"{error} by {count}" for error, count in port.grown.items())
            yield Verdict("wrong", f"{name}: {grown} in half a second")
    if facts.rdma and not any(port.grown for _, _, port in _ports(facts)):
        yield Verdict("ok", "none has grown")


@health_check(
    "RDMA retries",
    reads="`NCCL_IB_TIMEOUT`, `NCCL_IB_RETRY_CNT`",
    healthy="unset, or at least 20 and 7",
    effect="less: a short disturbance ends the run (IBV_WC_RETRY_EXC_ERR, status 12)",
    fix="unset NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT",
)
def retries(facts: HostFacts) -> Iterator[Verdict]:
    """Judge how long a lost packet is sent again."""
    least = {"NCCL_IB_TIMEOUT": LEAST_TIMEOUT, "NCCL_IB_RETRY_CNT": LEAST_RETRIES}
    for name, number in least.items():
        value = facts.setting(name)
        if facts.rdma and value.isdecimal() and int(value) < number:
            yield Verdict("warning", facts.quoted(name))


@health_check(
    "locked memory",
    reads="`Max locked memory` in `/proc/self/limits`, and `CapEff` in `/proc/self/status`",
    healthy="unlimited, or the capability IPC_LOCK, where there is an RDMA device",
    effect="64 or 8192 KB: registering memory fails (ibv_reg_mr, ENOMEM)",
    fix="ulimit -l unlimited (memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of a "
    "service); docker run --ulimit memlock=-1 --cap-add IPC_LOCK --device /dev/infiniband",
)
def memlock(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the limit of memory that a device may read."""
    if facts.rdma and facts.memlock is not None:
        yield Verdict("wrong", f"{facts.memlock // 1024} KB may be locked")
    elif facts.rdma:
        yield Verdict("ok", "unlimited")
