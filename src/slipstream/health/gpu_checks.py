"""Checks of hosts with GPUs: how RDMA devices and GPUs reach each other, and what NCCL took."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slipstream.health.diagnosis import Verdict, health_check
from slipstream.health.facts import HostFacts

DMABUF_KERNEL = (5, 12)
OFF, FAR = ("0", "LOC"), ("5", "SYS")
"""Values of NCCL_NET_GDR_LEVEL: never, and over the bus between sockets, too."""
TRANSLATED = ("DMA", "DMA-FQ")
OTHER_NODE = "another NUMA node"
BETWEEN_SOCKETS = ("SYS", OTHER_NODE)


@health_check(
    "peer memory",
    reads="`/sys/module/nvidia_peermem`, `/sys/kernel/mm/memory_peers`; for dma-buf "
    "`/proc/driver/nvidia/version`, the kernel's version, `NCCL_DMABUF_ENABLE`",
    healthy="a module is loaded, or the open driver on Linux 5.12 or later",
    effect="neither: data of a GPU goes through the host's memory, at about half the rate",
    fix="modprobe nvidia_peermem (and write it to /etc/modules-load.d), or install NVIDIA's open "
    "kernel modules",
)
def peer_memory(facts: HostFacts) -> Iterator[Verdict]:
    """Judge whether an RDMA device may read a GPU's memory."""
    if not facts.gpus or not facts.rdma:
        return
    version = re.match(r"(\d+)\.(\d+)", facts.versions.get("kernel", ""))
    new = version is not None and (int(version[1]), int(version[2])) >= DMABUF_KERNEL
    enabled = facts.setting("NCCL_DMABUF_ENABLE") != "0"
    if facts.peer_memory:
        yield Verdict("ok", facts.peer_memory)
    elif facts.open_driver and new and enabled:
        yield Verdict("ok", "dma-buf of the open driver")
    else:
        why = "NCCL_DMABUF_ENABLE=0" if not enabled else "no dma-buf"
        yield Verdict("wrong", f"no peer memory module is loaded, and {why}")


@health_check(
    "GPUDirect settings",
    reads="`NCCL_NET_GDR_LEVEL`, `NCCL_NET_GDR_READ`",
    healthy="unset",
    effect="level LOC or 0: GPUDirect is off; SYS: it crosses sockets, slowly; read 0: what is "
    "sent goes through the host's memory",
    fix="unset NCCL_NET_GDR_LEVEL and NCCL_NET_GDR_READ",
)
def gdr(facts: HostFacts) -> Iterator[Verdict]:
    """Judge settings that keep RDMA devices from GPUs."""
    if not facts.gpus or not facts.rdma:
        return
    level, read = facts.setting("NCCL_NET_GDR_LEVEL"), facts.setting("NCCL_NET_GDR_READ")
    if level.upper() in (*OFF, *FAR):
        quoted = facts.quoted("NCCL_NET_GDR_LEVEL")
        yield Verdict("wrong" if level.upper() in OFF else "warning", quoted)
    if read == "0":
        yield Verdict("warning", facts.quoted("NCCL_NET_GDR_READ"))


@health_check(
    "PCIe link",
    reads="`current_link_speed`, `current_link_width`, `max_*` of RDMA devices and GPUs in `/sys`",
    healthy="RDMA devices at their full speed, they and GPUs on all their lanes",
    effect="x8 of x16, or 8 GT/s: half the rate",
    fix="seat the card anew or move it to a slot with all its lanes; look for bifurcation and link "
    "speed in the firmware's setup",
)
def pcie(facts: HostFacts) -> Iterator[Verdict]:
    """Judge lanes and speed. A GPU lowers its speed while it is idle, never its lanes."""
    fine = []
    rdma = [device.pci for device in facts.rdma]
    for link in (*rdma, *facts.gpus):
        narrow = link.width and link.max_width and link.width < link.max_width
        slow = link in rdma and link.speed and link.max_speed and link.speed < link.max_speed
        if narrow or slow:
            read = f"{link.name} runs at x{link.width}, {link.speed:g} GT/s"
            yield Verdict("wrong", f"{read} of x{link.max_width}, {link.max_speed:g} GT/s")
        elif link.width:
            fine.append(f"{link.name} x{link.width}")
    if fine:
        yield Verdict("ok", ", ".join(fine))


@health_check(
    "ACS",
    reads="`ACSCtl` of the bridges in `lspci -vvv`, as root",
    healthy="off on every bridge; in a virtual machine it must be on",
    effect="on: data between devices goes up to the processor and back",
    fix="for each bridge: setpci -s BRIDGE ECAP_ACS+0x6.w=0000 (until the next boot), or switch it "
    "off in the firmware's setup",
)
def acs(facts: HostFacts) -> Iterator[Verdict]:
    """Judge Access Control Services on the way between devices."""
    if facts.virtual_machine or not facts.gpus or not (facts.rdma or len(facts.gpus) > 1):
        return
    if facts.acs is None:
        why = "lspci is not installed, or shows capabilities to root alone"
        yield Verdict(
            "unknown", why, 'sudo "$(command -v slipstream)" doctor host, with pciutils installed'
        )
    elif facts.acs:
        more = len(facts.acs) - 3
        named = ", ".join(facts.acs[:3]) + (f" and {more} more" if more > 0 else "")
        yield Verdict("wrong", f"on for bridge {named}")
    else:
        yield Verdict("ok", "off")


@health_check(
    "IOMMU",
    reads="`/sys/kernel/iommu_groups/*/type`",
    healthy="off, or passed through (identity)",
    effect="DMA or DMA-FQ: every access between devices is translated, and ACS is switched on",
    fix="add iommu=pt to the kernel's command line, or switch it off in the firmware's setup",
)
def iommu(facts: HostFacts) -> Iterator[Verdict]:
    """Judge whether addresses of devices are translated."""
    if not facts.gpus or not facts.rdma or facts.virtual_machine:
        return
    translated = [kind for kind in facts.iommu if kind in TRANSLATED]
    if translated:
        yield Verdict("warning", f"groups of type {', '.join(translated)}")
    else:
        yield Verdict("ok", "off" if not facts.iommu else "passed through")


@health_check(
    "GPU and RDMA device",
    reads="`nvidia-smi topo -m`; without it `numa_node` of GPUs and RDMA devices in `/sys`",
    healthy="each GPU has an RDMA device behind the same switch (PIX, PXB), or on its NUMA node",
    effect="PHB, NODE or SYS: data goes through the processor, or from socket to socket",
    fix="move the card to a slot of the GPU's socket, or give these ranks GPUs beside the card "
    "(CUDA_VISIBLE_DEVICES)",
)
def placement(facts: HostFacts) -> Iterator[Verdict]:
    """Judge whether each GPU has an RDMA device beside it."""
    if not facts.gpus or not facts.rdma:
        return
    far: dict[str, list[str]] = {}
    for place in facts.gpu_places:
        if place.way not in ("PIX", "PXB"):
            far.setdefault(place.way, []).append(place.gpu)
    if not facts.gpu_places:
        nodes = {device.pci.numa_node for device in facts.rdma}
        lonely = [g.name for g in facts.gpus if None not in nodes and g.numa_node not in nodes]
        far = {OTHER_NODE: lonely} if lonely else {}
    for way, gpus in far.items():
        read = f"the nearest RDMA device of {', '.join(gpus)} is at {way}"
        yield Verdict("wrong" if way in BETWEEN_SOCKETS else "warning", read)
    if not far:
        yield Verdict("ok", "each GPU has one beside it")


@health_check(
    "CPUs and GPU",
    reads="`Cpus_allowed_list` in `/proc/self/status`, NUMA nodes of CPUs and GPUs in `/sys`",
    healthy="this process may use CPUs of the NUMA node of every GPU",
    effect="CPUs of another socket: copies and launches cross over",
    fix="start the rank with numactl --cpunodebind=NODE, or without a binding to one socket",
)
def cpus(facts: HostFacts) -> Iterator[Verdict]:
    """Judge whether the process runs beside the GPUs."""
    nodes = {gpu.numa_node for gpu in facts.gpus} - {None}
    if nodes and facts.cpu_nodes:
        apart = sorted(str(node) for node in nodes if node not in facts.cpu_nodes)
        own = ", ".join(map(str, facts.cpu_nodes))
        if apart:
            read = f"CPUs of node {own}, GPUs on node {', '.join(apart)}"
            yield Verdict("warning", read)
        else:
            yield Verdict("ok", f"node {own}")


@health_check(
    "NCCL's network",
    reads="`via NET/...` in NCCL's log (`--nccl-log`; `NCCL_DEBUG=INFO`)",
    healthy="NET/IB/.../GDRDMA, where there are RDMA devices and GPUs",
    effect="NET/IB: data goes through the host's memory; NET/Socket: TCP",
    fix="look at the checks of peer memory, ACS and GPUDirect settings; for NET/Socket at "
    "NCCL_IB_DISABLE, NCCL_IB_HCA and the ports",
)
def nccl_network(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the network that NCCL took, by proof."""
    if (log := facts.nccl_log) is None:
        return
    networks = ", ".join(f"NET/{network}" for network in log.networks)
    if facts.rdma and (log.no_device or "Socket" in log.networks):
        said = "NET/IB : No device found" if log.no_device else networks
        yield Verdict("wrong", f"the log says {said}, but there are RDMA devices")
    elif facts.rdma and "IB" in log.networks:
        yield Verdict("wrong", f"the log says {networks}, without GDRDMA")
    elif log.networks:
        yield Verdict("ok", networks)
    else:
        fix = "record it on several hosts with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,TUNING"
        yield Verdict("unknown", "the log names no network between hosts", fix)


@health_check(
    "NCCL's algorithm",
    reads="`Algo` in NCCL's log (`NCCL_DEBUG_SUBSYS=INIT,NET,TUNING`)",
    healthy="rings for all-reduces of 1 MB and more over TCP",
    effect="a tree: a host sends the data up to twice; in a ring of four hosts 1.5 times, a "
    "quarter less",
    fix="try NCCL_ALGO=Ring, and measure both",
)
def nccl_algorithm(facts: HostFacts) -> Iterator[Verdict]:
    """Judge trees, which save latency and cost bandwidth."""
    log = facts.nccl_log
    if log is None or "Socket" not in log.networks or not log.trees + log.rings:
        return
    if log.trees:
        count = f"{log.trees} of {log.trees + log.rings}"
        yield Verdict("warning", f"{count} large all-reduces go by a tree, over TCP")
    else:
        yield Verdict("ok", "rings")
