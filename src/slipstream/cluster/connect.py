"""Join the ranks: the process group of the world, the hosts of all ranks, and this rank's device.

Leaves ``os.environ`` as it is, and destroys only process groups that it made.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from slipstream.cluster import groups
from slipstream.cluster._ends import note_leaving
from slipstream.cluster.environment import Environment
from slipstream.cluster.listen import admit, new_token, open_store, run_token
from slipstream.cluster.topology import ranks_by_host
from slipstream.errors import ClusterError, warn

TIMEOUT = timedelta(minutes=10)
"""Of the rendezvous."""
AGREE_INTERVAL = 0.02
"""Seconds between two looks of the first rank for the others."""

# A process may connect, close and connect again. The store of an address is kept open: a rank that
# comes early to the next rendezvous must not meet one that is about to be closed. The number of the
# rendezvous becomes a prefix: keys of an earlier one hold addresses that are gone.
_stores: dict[str, tuple[Store, Iterator[int]]] = {}
# How many use each world that was made here: whoever closes last destroys it.
_users: dict[dist.ProcessGroup, int] = {}


def from_environ() -> Environment:
    """This process's environment: the only place where slipstream reads the launcher's variables.

    Where the script has a process group, that knows the ranks, and variables of a launcher that do
    not describe them (Lightning's sets no ``RANK``) count as none.

    Raises:
        ClusterError: there is no group, and the variables describe no usable set of ranks.

    Example:
        >>> from_environ().world_size
        1
    """
    host = socket.gethostname()
    try:
        return Environment.read(os.environ, host)
    except ClusterError:
        if not dist.is_initialized():
            raise
        return Environment(host=host)


@dataclass(frozen=True)
class Cluster:
    """The joined ranks, as this rank sees them; made by `connect`.

    ``world`` is None for one process without a launcher, where every exchange is the identity.
    ``hosts[rank]`` is the host of a rank. ``owns_world`` says that `connect` made the process
    group, so that `close` destroys it, once all who use it are closed.
    """

    environment: Environment
    device: torch.device
    world: dist.ProcessGroup | None
    hosts: tuple[str, ...]
    owns_world: bool
    _groups: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """This rank, 0 .. world_size - 1."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.environment.world_size

    @property
    def store(self) -> Store:
        """The store of the world, in which ranks find each other; only where there is a world."""
        return dist.distributed_c10d._get_default_store()  # torch names it nowhere else (2.15)

    def new_group(
        self, ranks: Sequence[int] | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A group of ``ranks`` (default: all); None for a rank outside it, or without a world.

        ``backend`` defaults to that of the world, whose timeout the group has. Every rank of the
        world must call this, in the same order, as for ``dist.new_group``.
        """
        if self.world is None:
            return None
        group = groups.new_group(ranks, like=self.world, backend=backend)
        if group is not None:
            self._groups.append(group)
        return group

    def close(self) -> None:
        """Destroy the groups of `new_group`, and the world if `connect` made it, with the last who
        uses it; idempotent."""
        if not dist.is_initialized():  # the script has destroyed all groups already
            self._groups.clear()
        while self._groups:
            with suppress(ValueError):  # so it has, and has made others
                dist.destroy_process_group(self._groups.pop())
        if not self.owns_world or self.world is None:
            return
        world = self.world
        # A group is freed, and its threads end, with its last reference: threads that outlive the
        # interpreter abort the process.
        object.__setattr__(self, "world", None)
        _users[world] -= 1
        if not _users[world]:
            del _users[world]
            if dist.is_initialized() and dist.group.WORLD is world:
                dist.destroy_process_group()


def connect(
    environment: Environment, device: torch.device | str, timeout: timedelta | None = None
) -> Cluster:
    """Join the ranks that ``environment`` describes, or use the script's own process group.

    If the script has initialized a default process group, that one is used, with its rank and
    world size. Otherwise a launcher's ranks make one (gloo; for a CUDA device gloo for CPU tensors
    and NCCL for CUDA tensors), and a process without a launcher makes none. A CUDA device without
    an index becomes the GPU of the local rank, and the current device. ``timeout`` bounds the
    rendezvous (None: 10 minutes) and each later collective (None: torch's default, half an hour).

    Raises:
        ClusterError: the ranks do not meet, or this rank has no GPU; names rank, host and address.

    Example:
        >>> cluster = connect(Environment(), "cpu")
        >>> cluster.world, cluster.world_size, cluster.hosts
        (None, 1, ('localhost',))
    """
    note_leaving(environment.rank, environment.local_rank, environment.host)
    device = torch.device(device)
    ready = dist.is_initialized()
    if device.type == "cuda":
        device = _cuda_device(device, environment, chosen_by_script=ready)
        torch.cuda.set_device(device)
    if not ready and environment.source == "none":
        _warn_of_spawned_ranks()
        return Cluster(environment, device, None, (environment.host,), owns_world=False)
    if not ready:
        _init_world(environment, device, timeout)
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, environment.host)
    environment = _as_in_world(environment, hosts)
    world = dist.distributed_c10d._get_default_group()
    owns = not ready or world in _users
    if owns:
        _users[world] = _users.get(world, 0) + 1
    return Cluster(environment, device, world, tuple(hosts), owns_world=owns)


def _warn_of_spawned_ranks() -> None:
    """Warn where a script that starts its ranks itself has told them where to meet, and not made
    the process group: each would train alone."""
    if "MASTER_ADDR" in os.environ and multiprocessing.parent_process() is not None:
        warn(
            "this process trains alone: it was started by multiprocessing, with MASTER_ADDR and "
            "without RANK and WORLD_SIZE; where mp.spawn starts the ranks, call "
            'dist.init_process_group("gloo", rank=rank, world_size=ranks) before '
            "slipstream.data_share() and accelerate(); where it is to train alone, "
            "unset MASTER_ADDR",
        )


def reach_store(environment: Environment, timeout: timedelta) -> Store:
    """Reach the store where the ranks meet, without waiting for the others to come.

    For those that look at the network before there is a process group. Rank 0 opens the store,
    unless the launcher has, and must outlive the others' use of it. The keys are those of the run.

    Args:
        environment: of this process, with an address.
        timeout: of the connection, and of each later wait without one of its own.

    Raises:
        ClusterError: the store is not reached; names rank, host and address.
    """
    address, port = str(environment.master_addr), int(environment.master_port or 0)
    try:
        keeper = _keeper(environment)
        opens = keeper is None and environment.rank == 0 and not _store_is_the_agents()
        store = keeper or TCPStore(
            address, port, is_master=opens, wait_for_workers=False, timeout=timeout
        )
        store.set_timeout(timeout)
        return PrefixStore(f"slipstream/{admit(store, run_token(), f'{address}:{port}')}", store)
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(_rendezvous_advice(environment, timeout, error)) from error


def local_gpu(environment: Environment, visible: int) -> int:
    """Index of this rank's GPU among ``visible`` ones: its local rank, or 0 if there is only one.

    Launchers that bind one GPU to each rank make only that one visible.

    Raises:
        ClusterError: fewer GPUs than ranks on this host.

    Example:
        >>> local_gpu(Environment(local_rank=1, local_world_size=2), visible=8)
        1
    """
    if visible == 1:
        return 0
    if environment.local_rank < visible:
        return environment.local_rank
    raise ClusterError(
        f"rank {environment.rank} on {environment.host} has local rank {environment.local_rank}, "
        f"but sees {visible} GPUs (CUDA_VISIBLE_DEVICES?); start at most {visible} ranks here, or "
        "train on the CPU"
    )


def _cuda_device(
    device: torch.device, environment: Environment, chosen_by_script: bool
) -> torch.device:
    """The device with its index."""
    if device != torch.device("cuda"):  # it has an index
        return device
    # Without a launcher's local rank, a script with a group of its own has set its current device.
    if chosen_by_script and environment.source == "none":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", local_gpu(environment, torch.cuda.device_count()))


def _init_world(environment: Environment, device: torch.device, given: timedelta | None) -> None:
    ranks, timeout = (environment.rank, environment.world_size), given or TIMEOUT
    address = str(environment.master_addr)
    bracketed = f"[{address}]" if ":" in address else address
    # tcp:// and not env://: Slurm and Open MPI do not set the variables that env:// reads.
    url = f"tcp://{bracketed}:{environment.master_port}"
    try:
        if url not in _stores:
            keeper = _keeper(environment)  # torch's store of the same port shares its server
            store, *_ = next(rendezvous(url, *ranks, timeout=timeout))
            del keeper
            _stores[url] = store, count()
        store, meetings = _stores[url]
        # the store of torch's agent outlives a restart, and has the addresses of those that died
        start = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(meetings)}"
        store.set_timeout(timeout)
        run = admit(store, run_token(), url.removeprefix("tcp://"))
        if environment.num_nodes > 1 and _store_is_the_agents():
            start = agree_on_start(PrefixStore(f"slipstream/{run}", store), *ranks, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"slipstream/{run}/{start}", store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=given or default_pg_timeout,
        )
    except (RuntimeError, OSError, ValueError) as error:
        _stores.pop(url, None)
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(_rendezvous_advice(environment, timeout, error)) from error


def agree_on_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agree on a word for this start of all ranks, in a store that outlives them.

    Nodes under torchrun count restarts each for itself, and differently. So every rank brings a
    word of its own, and the first rank answers with its own until all have heard that: what the
    dead have said is answered, too, and nobody hears it.

    Raises:
        RuntimeError: a rank does not come.
    """
    own = new_token()
    store.set(f"brought/{rank}", own)
    if rank:
        start = store.get(f"answer/{own}").decode()
        store.set(f"heard/{start}/{rank}", "")
        return start
    until = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    missing = [*range(1, world_size)]
    while missing := [other for other in missing if not store.check([f"heard/{own}/{other}"])]:
        for other in missing:
            if store.check([f"brought/{other}"]):
                word = store.get(f"brought/{other}")
                if answered.get(other) != word:
                    answered[other] = word
                    store.set(f"answer/{word.decode()}", own)
        if time.monotonic() > until:
            raise RuntimeError(f"rank {missing[0]} has not come")
        time.sleep(AGREE_INTERVAL)
    return own


def _store_is_the_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _keeper(environment: Environment) -> TCPStore | None:
    """The store of the first rank, on the interface of its address; None: another process has it,
    or the address is none of this machine, or not to other nodes, and torch listens on all."""
    if environment.rank or _store_is_the_agents():
        return None
    with suppress(OSError):
        address, port = str(environment.master_addr), int(environment.master_port or 0)
        alone = environment.num_nodes == 1
        return open_store(address, port, alone=alone, multi_tenant=True)
    return None


def _rendezvous_advice(environment: Environment, timeout: timedelta, error: Exception) -> str:
    """Which rank waited where and for how long, and what to check."""
    told = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if told and f"Unable to find address for: {told}" in str(error):
        names = ", ".join(name for _, name in socket.if_nameindex())
        return (
            f"GLOO_SOCKET_IFNAME={told}: {environment.host} has no such network interface, or it "
            f"has no address; unset the variable, or name one of {names}"
        )
    where = f"{environment.master_addr}:{environment.master_port}"
    text = (
        f"rank {environment.rank} of {environment.world_size} on {environment.host} could not join "
        f"the others at {where} (timeout {timeout.total_seconds():g} s): "
        f"{str(error).strip().splitlines()[0]}\n"
        f"Check that all {environment.world_size} ranks were started, that rank 0 runs on "
        f"{environment.master_addr}, that no firewall closes port {environment.master_port}, and "
        "that no other job uses it."
    )
    try:
        resolved = socket.gethostbyname(environment.host)
    except OSError:
        resolved = "nothing"
    if environment.num_nodes > 1 and (resolved == "nothing" or resolved.startswith("127.")):
        text += (
            f"\nThe host name {environment.host} resolves to {resolved}, which other nodes cannot "
            "reach: set GLOO_SOCKET_IFNAME (for GPUs also NCCL_SOCKET_IFNAME) to the network "
            "interface that joins the nodes, e.g. eth0."
        )
    return text


def _as_in_world(environment: Environment, hosts: Sequence[str]) -> Environment:
    """``environment`` with rank, world size and neighbours of the script's group, if it differs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (environment.rank, environment.world_size) == (rank, world_size):
        return environment
    by_host = ranks_by_host(hosts)
    neighbours = by_host[hosts[rank]]
    node_rank, local_rank = list(by_host).index(hosts[rank]), neighbours.index(rank)
    *_, host, source, address, port = astuple(environment)
    place = (rank, world_size, local_rank, len(neighbours), node_rank, len(by_host))
    return Environment(*place, host, source, address, port)
