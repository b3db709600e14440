"""Broken machines are named with their fix, healthy ones are well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.health.diagnosis import Diagnosis
from slipstream.health.facts import HostFacts
from slipstream.health.files import HostFiles
from slipstream.health.judge import HOST_CHECKS, judge_host
from slipstream.health.read import IPC_LOCK, read_host
from tests.health.machines import (
    BRIDGES,
    LIMITS,
    LOG,
    OPEN_DRIVER,
    PFC,
    TOPOLOGY,
    environ,
    for_each,
    interfaces,
    plain,
    read,
    with_gpus,
    with_roce,
    write,
)

PORT = "sys/class/infiniband/mlx5_{}/ports/1"
GDR = {"host": "node0", "interface": "eth0", "way": "IB/0/GDRDMA", "algorithm": "RING"}
TWO = {"eth0": "10.0.0.1", "ens1": "10.0.1.1"}
NO_TOPOLOGY = {"commands/nvidia-smi topo -m": None}
NO_PEER_MEMORY = {"sys/module": None}


def not_well(facts: HostFacts) -> list[Diagnosis]:
    return [found for found in judge_host(facts) if found.status != "ok"]


HEALTHY = {
    "plain TCP": (plain(), {}, ""),
    "InfiniBand and GPUs": (with_gpus(), {}, LOG.format(**GDR)),
    "RoCE and GPUs": (with_roce(), {}, ""),
    "without nvidia-smi": (with_gpus(), NO_TOPOLOGY, ""),
    "dma-buf instead of a module": (
        with_gpus(),
        NO_PEER_MEMORY | {"proc/driver/nvidia/version": OPEN_DRIVER.format(version="580.95.05")},
        "",
    ),
    "a second port without a cable": (
        with_gpus(),
        {"sys/class/infiniband/mlx5_0/ports/2/state": "1: DOWN"},
        "",
    ),
    "ACS of a virtual machine": (
        with_gpus(),
        {
            "proc/cpuinfo": "flags\t\t: fpu hypervisor",
            "commands/lspci -vvv": BRIDGES.format(acs="+"),
        },
        "",
    ),
    "settings that are fine": (
        with_gpus(),
        environ(NCCL_IB_HCA="=mlx5_0,mlx5_1", NCCL_SOCKET_IFNAME="^docker0", NCCL_IB_TIMEOUT="22"),
        "",
    ),
    "a container, whose interface announces fiction": (
        plain(),
        {"sys/class/net/eth0/device": None},
        "",
    ),
    "a bond of two": (
        {**plain()} | interfaces(TWO, dict.fromkeys(TWO, 10_000), "eth0"),
        {"sys/class/net/eth0/device": None, "sys/class/net/eth0/bonding/mode": "802.3ad 4"},
        "",
    ),
}


@pytest.mark.parametrize(("files", "changes", "log"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_machine_is_well(tmp_path: Path, files, changes, log: str) -> None:
    assert not_well(read(tmp_path, files, changes, log)) == []


def test_without_rdma_nothing_else_is_said_about_it(tmp_path: Path) -> None:
    found = {one.check: one.read for one in judge_host(read(tmp_path, plain()))}
    assert found.pop("RDMA") == "no RDMA device"
    assert [*found] == ["interface", "shared memory", "open files", "load"]


slow_eth0 = {**plain()} | interfaces(TWO, {"eth0": 1000, "ens1": 100_000}, "eth0")
docker = {**plain()} | interfaces(
    {**TWO, "docker0": "172.17.0.1"}, dict.fromkeys(TWO, 1) | {"docker0": 1}, "ens1"
)

BROKEN = {
    # (machine, changes, log), (check, status, words of what was read, words of the fix)
    "the interface of the host's name is the slow one": (
        (slow_eth0, {}, ""),
        ("interface", "wrong", "gloo takes eth0 (10.0.0.1, announces 1 Gbit/s", "IFNAME=ens1"),
    ),
    "the interface that gloo is told is a bridge": (
        (
            docker,
            {**environ(GLOO_SOCKET_IFNAME="docker0"), "sys/class/net/docker0/bridge/id": "8"},
            "",
        ),
        ("interface", "wrong", "gloo takes docker0 (172.17.0.1, bridge); there is ens1", "=ens1"),
    ),
    "the host's own name is loopback": (
        (plain(), {"commands/getent ahosts node0": "127.0.1.1 STREAM node0"}, ""),
        (
            "interface",
            "warning",
            "loopback), as node0 resolves to 127.0.1.1; there is eth0",
            "=eth0",
        ),
    ),
    "the host's own name is localhost": (
        (plain(), {"commands/getent ahosts node0": "127.0.0.1 STREAM node0"}, ""),
        ("interface", "warning", "gloo takes lo (127.0.0.1, loopback)", "=eth0, before training"),
    ),
    "an interface that is not there": (
        (plain(), environ(NCCL_SOCKET_IFNAME="ib0"), ""),
        ("interface", "wrong", "NCCL_SOCKET_IFNAME=ib0, but the interfaces are eth0", "unset it"),
    ),
    "NCCL took the slow interface": (
        (slow_eth0, environ(GLOO_SOCKET_IFNAME="ens1"), LOG.format(**GDR | {"way": "Socket/0"})),
        ("interface", "wrong", "NCCL takes eth0", "export NCCL_SOCKET_IFNAME=ens1"),
    ),
    "/dev/shm of 64 MB": (
        (plain(), {"proc/self/mounts": "shm /dev/shm tmpfs rw,size=65536k 0 0"}, ""),
        ("shared memory", "wrong", "/dev/shm has 64 MB", "--shm-size=8g"),
    ),
    "few open files": (
        (plain(), {"proc/self/limits": LIMITS.format(open_files=256, memlock=65536)}, ""),
        ("open files", "warning", "256 open files", "ulimit -n"),
    ),
    "a loaded host": (
        (plain(), {"proc/loadavg": "14.70 12.00 9.10 15/400 9000"}, ""),
        ("load", "warning", "14.7 processes want to run on 16 CPUs", "top"),
    ),
    "RDMA is switched off in a file": (
        (with_gpus(), {"etc/nccl.conf": "# of the site\nNCCL_IB_DISABLE=1"}, ""),
        ("RDMA", "wrong", "NCCL_IB_DISABLE=1 in /etc/nccl.conf, but there is mlx5_0", "unset"),
    ),
    "a device that is not there": (
        (with_gpus(), {"root/.nccl.conf": "NCCL_IB_HCA=mlx4_0"}, ""),
        ("RDMA device names", "wrong", "NCCL_IB_HCA=mlx4_0 in /root/.nccl.conf", "unset"),
    ),
    "no subnet manager": (
        (with_gpus(), {f"{PORT.format(1)}/state": "2: INIT"}, ""),
        ("RDMA ports", "wrong", "mlx5_1:1 is INIT", "opensm"),
    ),
    "a port with one lane": (
        (with_gpus(), {f"{PORT.format(0)}/rate": "100 Gb/sec (1X NDR)"}, ""),
        ("RDMA ports", "wrong", "mlx5_0:1 runs on one lane", "cable"),
    ),
    "a port without a lid": (
        (with_gpus(), {f"{PORT.format(0)}/lid": "0x0"}, ""),
        ("RDMA ports", "wrong", "mlx5_0:1 has lid 0", "subnet manager"),
    ),
    "an address of RoCE v1": (
        (with_roce(), environ(NCCL_IB_GID_INDEX="0"), ""),
        (
            "RoCE address",
            "wrong",
            "NCCL_IB_GID_INDEX=0; RoCE v2 with IPv4 is 3 on mlx5_0:1",
            "unset",
        ),
    ),
    "no address for RoCE": (
        (with_roce(), for_each(f"{PORT}/gids/3", None), ""),
        ("RoCE address", "wrong", "mlx5_0:1, mlx5_1:1: no address of RoCE v2", "an IPv4 address"),
    ),
    "a card without an address beside one with": (
        (with_roce(), {f"{PORT.format(1)}/gids/3": None}, ""),
        ("RoCE address", "warning", "mlx5_1:1: no address of RoCE v2", "an IPv4 address"),
    ),
    "small frames under RoCE": (
        (with_roce(), {"sys/class/net/ens1/mtu": "1500"}, ""),
        ("RDMA packet size", "warning", "over ens1, whose MTU is 1500", "ens1 mtu 9000"),
    ),
    "small packets of InfiniBand": (
        (
            with_gpus(),
            {"commands/ibv_devinfo": "hca_id: mlx5_0\nport: 1\nactive_mtu: 2048 (4)"},
            "",
        ),
        ("RDMA packet size", "warning", "mlx5_0:1 has an active MTU of 2048", "subnet manager"),
    ),
    "RoCE that loses packets": (
        (with_roce(), {"commands/mlnx_qos -i ens1": PFC.format(on=0)}, ""),
        ("lossless RoCE", "warning", "mlx5_0:1: no priority with PFC or ECN", "mlnx_qos"),
    ),
    "RoCE without a tool to ask": (
        (with_roce(), {"commands/mlnx_qos -i ens1": None}, ""),
        ("lossless RoCE", "unknown", "mlnx_qos cannot be run", "sudo mlnx_qos -i ens1"),
    ),
    "few retries": (
        (with_gpus(), environ(NCCL_IB_TIMEOUT="14"), ""),
        ("RDMA retries", "warning", "NCCL_IB_TIMEOUT=14", "unset"),
    ),
    "memlock": (
        (with_gpus(), {"proc/self/limits": LIMITS.format(open_files=65536, memlock=65536)}, ""),
        ("locked memory", "wrong", "64 KB may be locked", "--ulimit memlock=-1"),
    ),
    "no peer memory module": (
        (with_gpus(), NO_PEER_MEMORY, ""),
        ("peer memory", "wrong", "no peer memory module is loaded", "modprobe nvidia_peermem"),
    ),
    "dma-buf switched off": (
        (
            with_gpus(),
            {**NO_PEER_MEMORY, **environ(NCCL_DMABUF_ENABLE="0")}
            | {"proc/driver/nvidia/version": OPEN_DRIVER.format(version="580.95.05")},
            "",
        ),
        ("peer memory", "wrong", "NCCL_DMABUF_ENABLE=0", "modprobe"),
    ),
    "dma-buf of an old kernel": (
        (
            with_gpus(),
            NO_PEER_MEMORY
            | {"proc/driver/nvidia/version": OPEN_DRIVER.format(version="580.95.05")}
            | {"proc/sys/kernel/osrelease": "5.4.0-200-generic"},
            "",
        ),
        ("peer memory", "wrong", "no dma-buf", "modprobe"),
    ),
    "GPUDirect switched off": (
        (with_gpus(), environ(NCCL_NET_GDR_LEVEL="LOC"), ""),
        ("GPUDirect settings", "wrong", "NCCL_NET_GDR_LEVEL=LOC", "unset"),
    ),
    "GPUDirect without reads": (
        (with_gpus(), environ(NCCL_NET_GDR_READ="0"), ""),
        ("GPUDirect settings", "warning", "NCCL_NET_GDR_READ=0", "unset"),
    ),
    "PCIe at x8": (
        (with_gpus(), {"sys/class/infiniband/mlx5_1/device/current_link_width": "8"}, ""),
        ("PCIe link", "wrong", "mlx5_1 runs at x8, 32 GT/s of x16, 32 GT/s", "slot"),
    ),
    "PCIe at 8 GT/s": (
        (
            with_gpus(),
            {"sys/class/infiniband/mlx5_0/device/current_link_speed": "8.0 GT/s PCIe"},
            "",
        ),
        ("PCIe link", "wrong", "mlx5_0 runs at x16, 8 GT/s", "slot"),
    ),
    "a GPU at x8": (
        (with_gpus(), {"sys/bus/pci/devices/0000:02:00.0/current_link_width": "8"}, ""),
        ("PCIe link", "wrong", "GPU0 runs at x8", "slot"),
    ),
    "ACS on": (
        (with_gpus(), {"commands/lspci -vvv": BRIDGES.format(acs="+")}, ""),
        ("ACS", "wrong", "on for bridge 00:01.0", "setpci -s BRIDGE ECAP_ACS+0x6.w=0000"),
    ),
    "ACS that only root sees": (
        (
            with_gpus(),
            {"commands/lspci -vvv": "00:01.0 PCI bridge\n\tCapabilities: <access denied>"},
            "",
        ),
        ("ACS", "unknown", "to root alone", 'sudo "$(command -v slipstream)" doctor host'),
    ),
    "translated addresses": (
        (with_gpus(), {"sys/kernel/iommu_groups/0/type": "DMA-FQ"}, ""),
        ("IOMMU", "warning", "groups of type DMA-FQ", "iommu=pt"),
    ),
    "GPUs and cards across sockets": (
        (with_gpus(), {"commands/nvidia-smi topo -m": TOPOLOGY.format(near="SYS")}, ""),
        ("GPU and RDMA device", "wrong", "of GPU0, GPU1 is at SYS", "slot of the GPU's socket"),
    ),
    "NUMA across sockets": (
        (
            with_gpus(),
            NO_TOPOLOGY | for_each("sys/class/infiniband/mlx5_{}/device/numa_node", "1"),
            "",
        ),
        ("GPU and RDMA device", "wrong", "of GPU0 is at another NUMA node", "slot"),
    ),
    "CPUs of one socket": (
        (with_gpus(), {"proc/self/status": "Cpus_allowed_list:\t0-15"}, ""),
        ("CPUs and GPU", "warning", "CPUs of node 0, GPUs on node 1", "numactl"),
    ),
    "a log without GPUDirect": (
        (with_gpus(), {}, LOG.format(**GDR | {"way": "IB/0"})),
        ("NCCL's network", "wrong", "NET/IB, without GDRDMA", "peer memory"),
    ),
    "a log of TCP": (
        (with_gpus(), {}, LOG.format(**GDR | {"way": "Socket/0"})),
        ("NCCL's network", "wrong", "NET/Socket, but there are RDMA devices", "NCCL_IB_DISABLE"),
    ),
    "a log of one host": (
        (plain(), {}, "node0:7:7 [0] NCCL INFO cudaDriverVersion 13000"),
        ("NCCL's network", "unknown", "names no network", "NCCL_DEBUG=INFO"),
    ),
    "a tree over TCP": (
        (plain(), {}, LOG.format(**GDR | {"way": "Socket/0", "algorithm": "TREE"})),
        ("NCCL's algorithm", "warning", "1 of 1 large all-reduces go by a tree", "NCCL_ALGO=Ring"),
    ),
    "a tree of an older version": (
        (
            plain(),
            {},
            LOG.format(**GDR | {"way": "Socket/0", "algorithm": "0"}).replace("AllReduce: ", "")
            + "\nnode0:7:9 [0] NCCL INFO AllGather: 33554432 Bytes -> Algo 1 proto 2 time 9.1",
        ),
        ("NCCL's algorithm", "warning", "1 of 1 large all-reduces go by a tree", "measure both"),
    ),
}


@pytest.mark.parametrize(("machine", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_machine_is_named_with_its_fix(tmp_path: Path, machine, expected) -> None:
    check, status, words, fix = expected
    (found,) = not_well(read(tmp_path, *machine))
    assert (found.check, found.status, found.hosts) == (check, status, ("node0",))
    assert words in found.read
    assert fix in found.fix


def test_errors_that_grow_while_they_are_watched(tmp_path: Path) -> None:
    write(tmp_path, with_roce())
    counter = tmp_path / PORT.format(1) / "hw_counters/out_of_sequence"
    tree = HostFiles.of(tmp_path)
    assert not_well(read_host(tree)) == []

    def wait(seconds: float) -> None:
        counter.write_text("80")

    files = HostFiles(tmp_path, tree.run, wait)
    (found,) = not_well(read_host(files))
    assert (found.check, found.status) == ("RDMA errors", "wrong")
    assert found.read == "mlx5_1:1: out_of_sequence by 3 in half a second"


def test_what_may_not_be_read_is_named(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path, plain())
    opened = Path.open

    def open_most(path: Path, *arguments: str) -> object:
        if path.name == "loadavg":
            raise PermissionError
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", open_most)
    (found,) = not_well(read_host(HostFiles.of(tmp_path)))
    assert (found.check, found.status) == ("permissions", "unknown")
    assert found.read == "no permission to read /proc/loadavg"


def test_every_check_of_a_host_is_broken_by_some_machine() -> None:
    others = {"RDMA errors", "permissions"}
    assert {expected[0] for _, expected in BROKEN.values()} | others == {
        c.name for c in HOST_CHECKS
    }


def test_facts_travel_as_json(tmp_path: Path) -> None:
    facts = read(tmp_path, with_roce(), environ(NCCL_DEBUG="INFO"), LOG.format(**GDR))
    assert HostFacts.model_validate_json(facts.model_dump_json()) == facts


def test_the_sys_of_another_namespace_is_not_believed(tmp_path: Path) -> None:
    others = {
        "sys/class/net/eth0/statistics/rx_bytes": "5",
        "proc/sys/net/ipv6/conf/eth0/mtu": "9000",
    }
    (eth0, lo) = read(tmp_path, plain(), others).interfaces
    assert (eth0.name, eth0.kind, eth0.speed, eth0.mtu) == ("eth0", None, None, 9000)
    assert (lo.name, lo.kind, lo.addresses) == ("lo", "loopback", ("127.0.0.1",))


def test_the_first_setting_wins(tmp_path: Path) -> None:
    files = {
        "opt/my.conf": "NCCL_ALGO=Tree # slow\nNCCL_IB_TC=106",
        "etc/nccl.conf": "NCCL_ALGO=Ring",
    }
    variables = environ(NCCL_CONF_FILE="/opt/my.conf", NCCL_IB_TC="41", SECRET="1")
    found = read(tmp_path, plain(), {**files, **variables}).variables
    assert {name: (one.value, one.file) for name, one in found.items()} == {
        "NCCL_ALGO": ("Tree", "/opt/my.conf"),
        "NCCL_CONF_FILE": ("/opt/my.conf", ""),
        "NCCL_IB_TC": ("41", ""),
    }


def test_this_host_is_read() -> None:
    facts = read_host(HostFiles())
    assert facts.versions.keys() >= {"python", "torch", "slipstream", "kernel"}
    assert "127.0.0.1" in {a for one in facts.interfaces for a in one.addresses}
    assert {found.check for found in judge_host(facts)} >= {"load", "open files", "RDMA"}
    assert all(re.search(r"\w", found.read) for found in judge_host(facts))


@pytest.mark.parametrize(("bit", "limit"), [(IPC_LOCK, None), (IPC_LOCK - 1, 65536)])
def test_the_limit_of_locked_memory_does_not_count_with_the_capability(
    bit: int, limit: int | None, tmp_path: Path
) -> None:
    status = with_gpus()["proc/self/status"] + f"\nCapEff:\t{1 << bit:016x}"
    limits = LIMITS.format(open_files=65536, memlock=65536)
    changed = {"proc/self/status": status, "proc/self/limits": limits}
    assert read(tmp_path, with_gpus(), changed).memlock == limit
