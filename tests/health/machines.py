"""Machines as trees of files, with the words of Linux and of the tools: healthy ones, to be broken.

A machine is a mapping of paths below its root to texts. To break it, replace some of them; a text
of None takes a file away, or a folder with all below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path

from slipstream.health.facts import HostFacts
from slipstream.health.files import HostFiles
from slipstream.health.nccl import read_nccl_log
from slipstream.health.read import read_host

Files = Mapping[str, str]
Changes = Mapping[str, str | None]

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {open_files:<20} 1048576              files
Max locked memory         {memlock:<20} unlimited            bytes"""
ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sat Oct  4 09:00:00 UTC 2025\n"
    "GCC version:  gcc version 12.3.0"
)
OPEN_DRIVER = DRIVER.replace("x86_64 Kernel Module", "Open Kernel Module for x86_64")
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\t{near}\tSYS\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t{near}\t16-31\t1\t\tN/A
NIC0\t{near}\tSYS\t X \tSYS
NIC1\tSYS\t{near}\tSYS\t X

Legend:
  X    = Self
NIC Legend:
  NIC0: mlx5_0
  NIC1: mlx5_1"""
BRIDGES = """00:01.0 PCI bridge: Intel Corporation Device 352a (prog-if 00 [Normal decode])
\tCapabilities: [220 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\t\tACSCtl:\tSrcValid{acs} TransBlk- ReqRedir{acs} CmpltRedir{acs} UpstreamFwd- EgressCtrl-
01:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
\tKernel driver in use: mlx5_core"""
PFC = """DCBX mode: OS controlled
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   {on}   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor"""
LOG = """{host}:7:7 [0] NCCL INFO Bootstrap : Using {interface}:10.0.0.1<0>
{host}:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB {interface}:10.0.0.1<0>
{host}:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/{way}
{host}:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{way}
{host}:7:9 [0] NCCL INFO AllReduce: 8192 Bytes -> Algo TREE proto LL channel{{Lo..Hi}}={{0..0}}
{host}:7:9 [0] NCCL INFO AllReduce: 33554432 Bytes -> Algo {algorithm} proto SIMPLE time 9.1"""


def word(address: str) -> str:
    """An address as /proc/net/route writes it."""
    return IPv4Address(address).packed[::-1].hex().upper()


def interfaces(addresses: Mapping[str, str], speeds: Mapping[str, int], default: str) -> Files:
    """Interfaces with a device, each in a network of its own; Mbit/s that they announce."""
    files = {"sys/class/net/lo/type": "772", "sys/class/net/lo/mtu": "65536"}
    routes, local = (
        [ROUTES, f"{default} 00000000 0100000A 0003 0 0 0 00000000 0 0 0"],
        ["127.0.0.1"],
    )
    for name in ("lo", *addresses):
        folder = f"sys/class/net/{name}"
        files |= {f"{folder}/ifindex": "1", f"{folder}/statistics/rx_bytes": "1000"}
    for name, address in addresses.items():
        folder = f"sys/class/net/{name}"
        files |= {f"{folder}/type": "1", f"{folder}/operstate": "up", f"{folder}/mtu": "1500"}
        files |= {f"{folder}/speed": str(speeds[name]), f"{folder}/device/vendor": "0x15b3"}
        network = word(address.rpartition(".")[0] + ".0")
        routes.append(f"{name} {network} 00000000 0001 0 0 0 00FFFFFF 0 0 0")
        local.append(address)
    header = "Inter-| Receive\n face |bytes packets\n"
    counts = "\n".join(f"{name}: 1000 10" for name in ("lo", *addresses))
    trie = "\n".join(f"        |-- {address}\n           /32 host LOCAL" for address in local)
    return files | {
        "proc/self/net/dev": header + counts,
        "proc/self/net/route": "\n".join(routes),
        "proc/self/net/fib_trie": f"Main:\n  +-- 0.0.0.0/0 2 0 2\n{trie}",
        "proc/self/net/if_inet6": "fe800000000000000000000000000001 02 40 20 80 eth0",
    }


def plain(host: str = "node0", address: str = "10.0.0.1") -> Files:
    """A host with one interface of 10 Gbit/s, 16 CPUs and nothing else."""
    return interfaces({"eth0": address}, {"eth0": 10_000}, "eth0") | {
        "proc/sys/kernel/hostname": host,
        "proc/sys/kernel/osrelease": "6.8.0-45-generic",
        "proc/self/environ": "HOME=/root\0PATH=/usr/bin",
        "proc/self/limits": LIMITS.format(open_files=65536, memlock=8388608),
        "proc/self/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0",
        "proc/meminfo": "MemTotal:       65536000 kB",
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-15",
        "proc/loadavg": "0.40 0.35 0.30 1/400 9000",
        "proc/cpuinfo": "flags\t\t: fpu vme de",
        "sys/devices/system/node/node0/cpulist": "0-15",
        f"commands/getent ahosts {host}": f"{address}       STREAM {host}",
    }


def with_gpus(host: str = "node0", address: str = "10.0.0.1") -> Files:
    """A host with two sockets, on each a GPU and a port of InfiniBand."""
    files = {**plain(host, address)}
    files["proc/self/limits"] = LIMITS.format(open_files=65536, memlock="unlimited")
    files["proc/self/status"] = "Name:\tpython\nCpus_allowed_list:\t0-31"
    files["sys/devices/system/node/node1/cpulist"] = "16-31"
    files["proc/driver/nvidia/version"] = DRIVER.format(version="580.95.05")
    files["sys/module/nvidia_peermem/version"] = "580.95.05"
    files["sys/kernel/iommu_groups/0/type"] = "identity"
    files["commands/nvidia-smi topo -m"] = TOPOLOGY.format(near="PIX")
    files["commands/lspci -vvv"] = BRIDGES.format(acs="-")
    for node in (0, 1):
        link = {
            "current_link_speed": "32.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_width": "16",
            "numa_node": str(node),
        }
        gpu = f"sys/bus/pci/devices/0000:{node}2:00.0"
        files |= {f"{gpu}/vendor": "0x10de", f"{gpu}/class": "0x030200"}
        # an idle GPU lowers its speed
        files |= {f"{gpu}/{name}": text for name, text in link.items()}
        files[f"{gpu}/current_link_speed"] = "2.5 GT/s PCIe"
        device = f"sys/class/infiniband/mlx5_{node}"
        files |= {f"{device}/device/{name}": text for name, text in link.items()}
        port = {
            "state": "4: ACTIVE",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
            "lid": f"0x{node + 1}",
            "gids/0": "fe80:0000:0000:0000:0002:c903:00a5:0001",
            "gid_attrs/types/0": "IB/RoCE v1",
            "counters/symbol_error": "0",
            "counters/link_downed": "2",
        }
        files |= {f"{device}/ports/1/{name}": text for name, text in port.items()}
    devices = "\n".join(f"hca_id:\tmlx5_{n}\n\tport:\t1\n\tactive_mtu:\t4096 (5)" for n in (0, 1))
    files["commands/ibv_devinfo"] = devices
    return files


def with_roce(host: str = "node0", address: str = "10.0.0.1") -> Files:
    """The same with RoCE over two interfaces beside ``eth0``, which is slower."""
    addresses = {"eth0": address, "ens1": "10.0.1.1", "ens2": "10.0.2.1"}
    files = {**with_gpus(host, address)}
    speeds = {"eth0": 10_000, "ens1": 400_000, "ens2": 400_000}
    files |= interfaces(addresses, speeds, "eth0")
    for number, name in enumerate(("ens1", "ens2")):
        files[f"sys/class/net/{name}/mtu"] = "9000"
        port = f"sys/class/infiniband/mlx5_{number}/ports/1"
        files[f"{port}/link_layer"] = "Ethernet"
        files[f"{port}/lid"] = "0x0"
        files[f"{port}/gids/3"] = f"0000:0000:0000:0000:0000:ffff:0a00:0{number + 1}01"
        files[f"{port}/gid_attrs/types/3"] = "RoCE v2"
        files[f"{port}/gid_attrs/ndevs/3"] = name
        files[f"{port}/hw_counters/out_of_sequence"] = "77"
        files[f"commands/mlnx_qos -i {name}"] = PFC.format(on=1)
    return files


def write(root: Path, files: Files, changes: Changes | None = None) -> Path:
    """Write a machine below a folder, and return that."""
    kept = {**files, **(changes or {})}
    gone = [path for path, text in kept.items() if text is None]
    for path, text in kept.items():
        if text is not None and not any(f"{path}/".startswith(f"{folder}/") for folder in gone):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
    return root


def read(root: Path, files: Files, changes: Changes | None = None, log: str = "") -> HostFacts:
    """The facts of a machine that is written below a folder."""
    summary = read_nccl_log(log) if log else None
    return read_host(HostFiles.of(write(root, files, changes)), summary)


def environ(**variables: str) -> Changes:
    """An environment."""
    return {"proc/self/environ": "\0".join(f"{name}={text}" for name, text in variables.items())}


def for_each(pattern: str, text: str | None) -> Changes:
    """The same file of both devices."""
    return {pattern.format(number): text for number in (0, 1)}
