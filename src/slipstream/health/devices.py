"""RDMA devices, GPUs, and what lies between them on the PCIe bus."""

from __future__ import annotations

import re

from slipstream.health.facts import Gid, GpuPlace, PciLink, RdmaDevice, RdmaPort
from slipstream.health.files import HostFiles
from slipstream.health.network import NET

RDMA, PCI = "sys/class/infiniband", "sys/bus/pci/devices"
NVIDIA, DISPLAY = "0x10de", "0x03"
"""Vendor, and the class of devices that GPUs are in."""
PEER_MODULES = {
    "nvidia_peermem": "sys/module/nvidia_peermem/version",
    "nv_mem": "sys/kernel/mm/memory_peers/nv_mem/version",
    "nv_mem_nc": "sys/kernel/mm/memory_peers/nv_mem_nc/version",
}
"""Files that NCCL looks for, too."""
ERRORS = (
    *("counters/symbol_error", "counters/link_downed", "counters/port_rcv_errors"),
    *("hw_counters/out_of_sequence", "hw_counters/packet_seq_err"),
    *("hw_counters/local_ack_timeout_err", "hw_counters/rnr_nak_retry_err"),
)
"""Counters that stand still on a healthy port."""
WATCHED = 0.5
"""Seconds for which they are watched."""
WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways of ``nvidia-smi topo -m`` between PCIe devices, the shortest first."""
ZERO_GID = re.compile(r"[0:]*$|fe80:[0:]*$")


def read_rdma(files: HostFiles) -> tuple[RdmaDevice, ...]:
    """Read the RDMA devices, and watch their error counters for half a second."""
    before = _errors(files)
    if before:
        files.wait(WATCHED)
    after = _errors(files)
    mtus = _active_mtus(files) if before else {}
    devices = []
    for name in files.names(RDMA):
        ports = [
            _port(files, f"{RDMA}/{name}/ports/{number}", before, after, mtus.get((name, number)))
            for number in files.names(f"{RDMA}/{name}/ports")
        ]
        link = read_pci_link(files, f"{RDMA}/{name}/device", name)
        devices.append(RdmaDevice(name=name, pci=link, ports=tuple(ports)))
    return tuple(devices)


def read_gpus(files: HostFiles) -> tuple[PciLink, ...]:
    """Read the links of NVIDIA's GPUs, by the order of the bus, which is that of ``nvidia-smi``."""
    gpus = [
        address
        for address in files.names(PCI)
        if files.text(f"{PCI}/{address}/vendor") == NVIDIA
        and files.text(f"{PCI}/{address}/class").startswith(DISPLAY)
    ]
    return tuple(
        read_pci_link(files, f"{PCI}/{address}", f"GPU{number}")
        for number, address in enumerate(gpus)
    )


def read_pci_link(files: HostFiles, folder: str, name: str) -> PciLink:
    """Read speed, lanes and NUMA node of a device."""
    node = files.number(f"{folder}/numa_node")
    return PciLink(
        name=name,
        speed=_gigatransfers(files.text(f"{folder}/current_link_speed")),
        width=files.number(f"{folder}/current_link_width"),
        max_speed=_gigatransfers(files.text(f"{folder}/max_link_speed")),
        max_width=files.number(f"{folder}/max_link_width"),
        numa_node=None if node is None or node < 0 else node,
    )


def read_gpu_places(text: str) -> tuple[GpuPlace, ...]:
    """Read the best way of each GPU to an RDMA device from ``nvidia-smi topo -m``.

    Example:
        >>> read_gpu_places('''\\tGPU0\\tNIC0\\tNIC1\\tCPU Affinity
        ... GPU0\\t X \\tSYS\\tPIX\\t0-15
        ... NIC0\\tSYS\\t X \\tSYS
        ... NIC Legend:
        ...   NIC0: mlx5_0
        ...   NIC1: mlx5_1''')
        (GpuPlace(gpu='GPU0', device='mlx5_1', way='PIX'),)
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    names = dict(re.findall(r"^\s*(NIC\d+): (\S+)", "\n".join(lines), re.MULTILINE))
    header = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    places = []
    for line in lines:
        row = line.split()
        if not re.fullmatch(r"GPU\d+", row[0] if row else "") or row == header:
            continue
        ways = [
            (WAYS.index(way), names.get(column, column))
            for column, way in zip(header, row[1:], strict=False)
            if re.match(r"NIC\d|mlx|ib|bnxt|rdma", column) and way in WAYS
        ]
        if ways:
            way, device = min(ways)
            places.append(GpuPlace(gpu=row[0], device=device, way=WAYS[way]))
    return tuple(places)


def read_acs(text: str | None) -> tuple[str, ...] | None:
    """List the bridges of ``lspci -vvv`` with ACS on; None: it was not run, or not as root.

    Example:
        >>> read_acs('''00:01.0 PCI bridge: Intel
        ... \\t\\tACSCtl:\\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+
        ... 00:02.0 PCI bridge: Intel
        ... \\t\\tACSCtl:\\tSrcValid- TransBlk- ReqRedir- CmpltRedir-''')
        ('00:01.0',)
    """
    if text is None or "<access denied>" in text:
        return None
    found, device = [], ""
    for line in text.splitlines():
        if line[:1].strip():
            device = line.split()[0]
        elif re.search(r"ACSCtl:.*(SrcValid|ReqRedir|CmpltRedir)\+", line):
            found.append(device)
    return tuple(found)


def read_iommu(files: HostFiles) -> tuple[str, ...]:
    """List the kinds of translation that devices are under; empty: no IOMMU is on."""
    groups = "sys/kernel/iommu_groups"
    return tuple(sorted({files.text(f"{groups}/{group}/type") for group in files.names(groups)}))


def read_peer_memory(files: HostFiles) -> str:
    """Name the loaded module that lets RDMA devices read GPUs; empty: none."""
    return next((name for name, path in PEER_MODULES.items() if files.exists(path)), "")


def _port(
    files: HostFiles,
    folder: str,
    before: dict[str, int],
    after: dict[str, int],
    active_mtu: int | None,
) -> RdmaPort:
    gids = []
    for index in sorted(map(int, files.names(f"{folder}/gids"))):
        gid = files.text(f"{folder}/gids/{index}")
        if gid and not ZERO_GID.match(gid):
            kind = files.text(f"{folder}/gid_attrs/types/{index}")
            gids.append(Gid(index=index, gid=gid, type=kind))
    numbers = files.names(f"{folder}/gid_attrs/ndevs")
    interface = next(
        filter(None, (files.text(f"{folder}/gid_attrs/ndevs/{n}") for n in numbers)), ""
    )
    paths = {path for path in after if path.startswith(f"{folder}/")}
    grown = {p: after[p] - before.get(p, after[p]) for p in sorted(paths)}
    layer = files.text(f"{folder}/link_layer")
    return RdmaPort(
        number=int(folder.rpartition("/")[2]),
        state=files.text(f"{folder}/state").partition(": ")[2],
        rate=files.text(f"{folder}/rate"),
        link_layer=layer,
        lid=files.number(f"{folder}/lid") or 0,
        gids=tuple(gids),
        interface=interface,
        active_mtu=active_mtu,
        lossless=_lossless(files, interface) if layer == "Ethernet" and interface else None,
        grown={path.rpartition("/")[2]: count for path, count in grown.items() if count > 0},
    )


def _lossless(files: HostFiles, interface: str) -> int | None:
    """Priorities with PFC or ECN; None: neither the files nor the command are there."""
    marks = [
        files.text(f"{NET}/{interface}/ecn/{role}/enable/{priority}")
        for role in ("roce_np", "roce_rp")
        for priority in files.names(f"{NET}/{interface}/ecn/{role}/enable")
    ]
    qos = files.run(f"mlnx_qos -i {interface}") or ""
    said = re.search(r"PFC configuration:.*?enabled\s+([01 \t]+)", qos, re.DOTALL)
    if not marks and not said:
        return None
    return marks.count("1") + (said[1].count("1") if said else 0)


def _errors(files: HostFiles) -> dict[str, int]:
    """Values of the error counters of all ports, by path."""
    ports = [
        f"{RDMA}/{device}/ports/{port}"
        for device in files.names(RDMA)
        for port in files.names(f"{RDMA}/{device}/ports")
    ]
    values = {
        f"{port}/{error}": files.number(f"{port}/{error}") for port in ports for error in ERRORS
    }
    return {path: value for path, value in values.items() if value is not None}


def _active_mtus(files: HostFiles) -> dict[tuple[str, str], int]:
    """The MTU of each port, by device and number, from ``ibv_devinfo``."""
    found, device, port = {}, "", ""
    for line in (files.run("ibv_devinfo") or "").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "hca_id":
            device = value
        elif key == "port":
            port = value
        elif key == "active_mtu" and (size := re.match(r"\d+", value)):
            found[device, port] = int(size[0])
    return found


def _gigatransfers(text: str) -> float | None:
    """The number in ``16.0 GT/s PCIe``; None: there is none."""
    match = re.match(r"([\d.]+) GT/s", text)
    return float(match[1]) if match else None
