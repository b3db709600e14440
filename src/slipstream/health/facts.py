"""Facts of one host, and of the links between hosts: frozen values, which travel as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.strategy.setting import FrozenModel

InterfaceKind = Literal["loopback", "physical", "bond", "vlan", "bridge", "tunnel", "virtual"]
ANNOUNCING: tuple[InterfaceKind, ...] = ("physical", "bond", "vlan")
"""Kinds whose speed is that of a cable; what virtual ones announce is made up."""


class NetworkInterface(FrozenModel):
    """A network interface; None: not known.

    Attributes:
        name: such as ``eth0``.
        addresses: IPv4 and IPv6, those of the link alone (``fe80::``) left out.
        kind: None in a network namespace whose ``/sys`` is another one's.
        up: whether it can send.
        mtu: bytes of a packet.
        speed: bits per second that it announces; None for kinds that announce fiction.
    """

    name: str
    addresses: tuple[str, ...] = ()
    kind: InterfaceKind | None = None
    up: bool = True
    mtu: int | None = None
    speed: float | None = None


class PciLink(FrozenModel):
    """The PCIe link of a device: gigatransfers per second and lanes, now and at most."""

    name: str
    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None
    numa_node: int | None = None


class Gid(FrozenModel):
    """An address of an RDMA port."""

    index: int
    gid: str
    type: str


class RdmaPort(FrozenModel):
    """A port of an RDMA device, with the words of ``/sys/class/infiniband``.

    Attributes:
        number: from 1.
        state: such as ``ACTIVE`` or ``DOWN``.
        rate: such as ``400 Gb/sec (4X NDR)``.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        lid: address on InfiniBand; 0: no subnet manager has given it one.
        gids: its addresses that are not zero.
        interface: its network interface; empty: none.
        active_mtu: bytes, as ``ibv_devinfo`` says.
        lossless: priorities without loss (PFC), or with congestion marks (ECN); None: not known.
        grown: error counters that grew while they were watched, and by how much.
    """

    number: int
    state: str = ""
    rate: str = ""
    link_layer: str = ""
    lid: int = 0
    gids: tuple[Gid, ...] = ()
    interface: str = ""
    active_mtu: int | None = None
    lossless: int | None = None
    grown: dict[str, int] = Field(default_factory=dict)


class RdmaDevice(FrozenModel):
    """An RDMA device, such as ``mlx5_0``."""

    name: str
    pci: PciLink
    ports: tuple[RdmaPort, ...] = ()


class GpuPlace(FrozenModel):
    """The best way of a GPU to an RDMA device, as ``nvidia-smi topo -m`` names it (``PIX``)."""

    gpu: str
    device: str
    way: str


class NcclVariable(FrozenModel):
    """A setting of NCCL or gloo, and the file that it stands in; empty: the environment."""

    value: str
    file: str = ""


class NcclLog(FrozenModel):
    """The summary of a log of NCCL at ``NCCL_DEBUG=INFO``.

    Attributes:
        networks: ways of channels between hosts: ``IB/GDRDMA``, ``IB`` or ``Socket``.
        interface: of the bootstrap or the sockets, such as ``eth0``.
        no_device: NCCL found no RDMA device.
        trees: all-reduces by a tree of at least LARGE bytes.
        rings: those by a ring.
    """

    networks: tuple[str, ...] = ()
    interface: str = ""
    no_device: bool = False
    trees: int = 0
    rings: int = 0


class HostFacts(FrozenModel):
    """Facts of one host, read by `slipstream.health.read.read_host`; None: not known.

    Attributes:
        host: its name.
        versions: of ``python``, ``torch``, ``slipstream``, ``nccl``, ``kernel``, ``driver``.
        variables: settings of NCCL and gloo, by name.
        interfaces: of the network.
        default_route: the interface of the way to everywhere; empty: none.
        resolved: address of the host's own name, where gloo listens unless it is told otherwise;
            empty: none.
        memlock, open_files: soft limits; None: unlimited, as it is with the capability IPC_LOCK.
        shm: bytes of ``/dev/shm``.
        load: processes that wanted to run, the mean of the last minute.
        cpus: that this process may use.
        cpu_nodes: NUMA nodes of those.
        rdma: RDMA devices.
        gpus: links of NVIDIA's GPUs.
        gpu_places: what ``nvidia-smi topo -m`` says; empty: it could not be run.
        peer_memory: the module that lets an RDMA device read a GPU; empty: none is loaded.
        open_driver: whether NVIDIA's driver is the open one, which offers dma-buf.
        virtual_machine: whether a hypervisor runs this host.
        iommu: types of the groups, such as ``DMA`` or ``identity``.
        acs: bridges with Access Control Services on; None: not known.
        nccl_log: of the file that was given.
        denied: paths without permission.
    """

    host: str
    versions: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, NcclVariable] = Field(default_factory=dict)
    interfaces: tuple[NetworkInterface, ...] = ()
    default_route: str = ""
    resolved: str = ""
    memlock: int | None = None
    open_files: int | None = None
    shm: int | None = None
    load: float | None = None
    cpus: int = 1
    cpu_nodes: tuple[int, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    gpus: tuple[PciLink, ...] = ()
    gpu_places: tuple[GpuPlace, ...] = ()
    peer_memory: str = ""
    open_driver: bool = False
    virtual_machine: bool = False
    iommu: tuple[str, ...] = ()
    acs: tuple[str, ...] | None = None
    nccl_log: NcclLog | None = None
    denied: tuple[str, ...] = ()

    def interface_of(self, address: str) -> NetworkInterface | None:
        """The interface that has an address; None: none has."""
        return next((one for one in self.interfaces if address in one.addresses), None)

    def setting(self, name: str) -> str:
        """The value of a setting of NCCL or gloo; empty: it is not set."""
        return self.variables[name].value if name in self.variables else ""

    def quoted(self, name: str) -> str:
        """A setting as it was read: ``NAME=VALUE``, with the file unless it is a variable."""
        found = self.variables[name]
        return f"{name}={found.value}" + (f" in {found.file}" if found.file else "")


class HostLink(FrozenModel):
    """The measured link between two hosts.

    Attributes:
        hosts: the first and the second.
        error: why they do not reach each other; empty: they do.
        failed_at: the step that failed: ``come`` to the measurement, ``listen`` at an address that
            others reach, ``connect``, or let a ``message`` arrive.
        addresses: that gloo's connection has on each of them.
        latency: seconds from one to the other, half of the shortest round trip.
        rates: bits per second from the first to the second, and back.
        skew: seconds that the second's clock is ahead.
        skew_error: seconds by which that may be wrong.
    """

    hosts: tuple[str, str]
    error: str = ""
    failed_at: Literal["", "come", "listen", "connect", "message"] = ""
    addresses: tuple[str, str] = ("", "")
    latency: float = 0.0
    rates: tuple[float, float] = (0.0, 0.0)
    skew: float = 0.0
    skew_error: float = 0.0

    @property
    def rate(self) -> float:
        """Bits per second of the slower direction."""
        return min(self.rates)


class ClusterFacts(FrozenModel):
    """Facts of all hosts, and the links between them."""

    hosts: tuple[HostFacts, ...]
    links: tuple[HostLink, ...] = ()

    def of(self, host: str) -> HostFacts:
        """The facts of a host."""
        return next(one for one in self.hosts if one.host == host)
