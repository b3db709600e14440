"""Read the facts of a host."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from importlib import metadata

from slipstream.health.devices import (
    read_acs,
    read_gpu_places,
    read_gpus,
    read_iommu,
    read_peer_memory,
    read_rdma,
)
from slipstream.health.facts import HostFacts, NcclLog
from slipstream.health.files import HostFiles
from slipstream.health.nccl import read_variables
from slipstream.health.network import default_route, read_interfaces
from slipstream.version import __version__

KILOBYTE = 1024
IPC_LOCK = 14
"""The number of this capability."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def read_host(files: HostFiles, nccl_log: NcclLog | None = None) -> HostFacts:
    """Read everything that checks ask for, in about half a second; changes nothing.

    Commands of GPUs and RDMA devices run only where there are such.

    Args:
        files: where to read.
        nccl_log: the summary of a log, which becomes one of the facts.

    Example:
        >>> read_host(HostFiles()).cpus > 0
        True
    """
    host = files.text("proc/sys/kernel/hostname")
    resolved = (files.run(f"getent ahosts {host}") or "").split()
    limits = files.text("proc/self/limits")
    load = re.match(r"\d+\.\d+", files.text("proc/loadavg"))
    driver = files.text("proc/driver/nvidia/version")
    cpus = _numbers(_status(files, "Cpus_allowed_list"))
    gpus, rdma = read_gpus(files), read_rdma(files)
    topology = files.run("nvidia-smi topo -m") if gpus and rdma else None
    return HostFacts(
        host=host or "localhost",
        versions=_versions(files, driver),
        variables=read_variables(files),
        interfaces=read_interfaces(files),
        default_route=default_route(files),
        resolved=resolved[0] if resolved else "",
        memlock=None if _may_lock(files) else _limit(limits, "Max locked memory"),
        open_files=_limit(limits, "Max open files"),
        shm=_shm(files),
        load=float(load[0]) if load else None,
        cpus=len(cpus) or 1,
        cpu_nodes=_nodes(files, cpus),
        rdma=rdma,
        gpus=gpus,
        gpu_places=read_gpu_places(topology or ""),
        peer_memory=read_peer_memory(files),
        open_driver="Open Kernel Module" in driver,
        virtual_machine=" hypervisor" in files.text("proc/cpuinfo"),
        iommu=read_iommu(files),
        acs=read_acs(files.run("lspci -vvv")) if gpus else None,
        nccl_log=nccl_log,
        denied=tuple(dict.fromkeys(files.denied)),
    )


def _versions(files: HostFiles, driver: str) -> dict[str, str]:
    """Versions that are known; those of Python packages without importing them."""
    found = {"kernel": files.text("proc/sys/kernel/osrelease")}
    if match := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", driver):
        found["driver"] = match[1]
    if files.is_here:
        found |= {"python": platform.python_version(), "slipstream": __version__}
        with suppress(metadata.PackageNotFoundError):
            found["torch"] = metadata.version("torch")
        for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
            with suppress(metadata.PackageNotFoundError):
                found.setdefault("nccl", metadata.version(package))
    return {name: version for name, version in sorted(found.items()) if version}


def _limit(text: str, name: str) -> int | None:
    """The soft limit of this name; None: unlimited, or not told."""
    match = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _may_lock(files: HostFiles) -> bool:
    """Whether the limit of locked memory does not count, by the capability IPC_LOCK."""
    effective = _status(files, "CapEff")
    return bool(re.fullmatch("[0-9a-f]+", effective)) and int(effective, 16) >> IPC_LOCK & 1 == 1


def _shm(files: HostFiles) -> int | None:
    """Bytes of /dev/shm: its option ``size``, else half of the memory, as Linux has it."""
    for line in reversed(files.text("proc/self/mounts").splitlines()):
        fields = line.split()
        if len(fields) > 3 and fields[1] == "/dev/shm":
            if size := re.search(r"\bsize=(\d+)([kmg]?)\b", fields[3]):
                return int(size[1]) * _UNITS[size[2]]
            memory = re.search(r"^MemTotal:\s+(\d+)", files.text("proc/meminfo"), re.MULTILINE)
            return int(memory[1]) * KILOBYTE // 2 if memory else None
    return None


def _nodes(files: HostFiles, cpus: set[int]) -> tuple[int, ...]:
    """NUMA nodes that have one of these CPUs."""
    folder = "sys/devices/system/node"
    nodes = [int(name[4:]) for name in files.names(folder) if re.fullmatch(r"node\d+", name)]
    return tuple(
        node
        for node in sorted(nodes)
        if cpus & _numbers(files.text(f"{folder}/node{node}/cpulist"))
    )


def _status(files: HostFiles, key: str) -> str:
    match = re.search(rf"^{key}:\s*(\S+)", files.text("proc/self/status"), re.MULTILINE)
    return match[1] if match else ""


def _numbers(text: str) -> set[int]:
    """Numbers of a list as the kernel writes it.

    Example:
        >>> sorted(_numbers("0-2,8"))
        [0, 1, 2, 8]
    """
    spans = [part.partition("-") for part in text.split(",") if part]
    return {n for first, _, last in spans for n in range(int(first), int(last or first) + 1)}
