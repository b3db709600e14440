"""Rank, neighbours and rendezvous of this process, from the variables that a launcher sets.

Everything here is a function of its arguments: ``connect.from_environ`` passes ``os.environ`` in.

Launchers in order of precedence; the first one whose variables are set has started this process:

    torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT [LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK]
    mpi       OMPI_COMM_WORLD_{RANK, SIZE, LOCAL_RANK, LOCAL_SIZE}
    slurm     SLURM_{PROCID, NTASKS, LOCALID, NODEID, NNODES} inside a step that ``srun`` started
    none      none of these: one process. The shell of ``salloc`` and the script of ``sbatch`` count
              as such, too: they have SLURM_NTASKS, but are no step. So does a process of MPICH,
              unless its PMI_SIZE says that there are others, which is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from slipstream.cluster.slurm import expand_counts, expand_hosts
from slipstream.errors import ClusterError

EnvironmentSource = Literal["torchrun", "mpi", "slurm", "none"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Environment:
    """The place of this process among the ranks, and the address of the rendezvous on rank 0.

    ``node_rank`` and ``local_rank`` count nodes and the ranks on this node from 0. Without a
    launcher ``source`` is "none", the world size 1, and there is no address.

    Example:
        >>> Environment.read({})
        Environment(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, \
num_nodes=1, host='localhost', source='none', master_addr=None, master_port=None)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    host: str = "localhost"
    source: EnvironmentSource = "none"
    master_addr: str | None = None
    master_port: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], host: str = "localhost") -> Environment:
        """The environment of a process on ``host`` with the variables ``environ``.

        Raises:
            ClusterError: variables are missing, contradict each other or are not numbers; names
                each variable with its value.

        Example:
            >>> variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
            ...              "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "2950"}
            >>> Environment.read(variables).node_rank
            1
        """
        variables = _Variables({name: value for name, value in environ.items() if value})
        steps = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")
        if variables.any("RANK", "WORLD_SIZE"):
            environment = _read_torchrun(variables)
        elif variables.any("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
            environment = _read_mpi(variables)
        elif variables.any("SLURM_PROCID") and variables.any(*steps):
            environment = _read_slurm(variables)
        elif variables.number("PMI_SIZE", 1) > 1:
            raise ClusterError(
                f"PMI_SIZE={variables.text('PMI_SIZE')} is set: MPICH, Intel MPI or Cray's mpiexec "
                "has started this process, whose variables are not read; set RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT for each process (RANK=$PMI_RANK), or unset PMI_SIZE "
                "if each is to train alone"
            )
        else:
            environment = cls()
        return replace(environment, host=host)


class _Variables:
    """Typed look-ups of variables; errors name the variables and their values."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def any(self, *names: str) -> bool:
        return any(name in self.values for name in names)

    def first(self, *names: str) -> str:
        """The first of ``names`` that is set, else the last."""
        return next((name for name in names if name in self.values), names[-1])

    def text(self, *names: str) -> str | None:
        """The value of the first of ``names`` that is set."""
        return self.values.get(self.first(*names))

    def needed(self, name: str, why: str) -> str:
        if name not in self.values:
            raise ClusterError(f"{name} is not set, but {why}; set {name}")
        return self.values[name]

    def number(self, name: str, default: int | None = None, least: int = 0, why: str = "") -> int:
        if default is not None and name not in self.values:
            return default
        text = self.needed(name, why)
        if not text.strip().isdecimal() or int(text) < least:
            raise ClusterError(f"{name}={text!r} is not an integer of at least {least}")
        return int(text)

    def port(self, default: int | None = None, why: str = "") -> int:
        port = self.number("MASTER_PORT", default, least=1, why=why)
        if port > 65535:
            raise ClusterError(f"MASTER_PORT={port} is not a port; ports are 1..65535")
        return port


def _read_torchrun(variables: _Variables) -> Environment:
    """RANK and its companions; the local ones are absent where ranks were started by hand."""
    rank, world_size = _rank_and_size(variables, "RANK", "WORLD_SIZE")
    why = f"RANK={rank} and WORLD_SIZE={world_size} are: the ranks meet there"
    address = variables.needed("MASTER_ADDR", why)
    one_node = address in LOOPBACK
    local_size = variables.number("LOCAL_WORLD_SIZE", world_size if one_node else 1, least=1)
    local_rank = variables.number("LOCAL_RANK", rank % local_size)
    _check_range("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    _check_range("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", world_size, first=1)
    node_rank = variables.number("GROUP_RANK", rank // local_size)
    num_nodes = variables.number("GROUP_WORLD_SIZE", ceil(world_size / local_size), least=1)
    _check_range("GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", num_nodes)
    place = (rank, world_size, local_rank, local_size, node_rank, num_nodes)
    port = variables.port(why=why)
    return Environment(*place, source="torchrun", master_addr=address, master_port=port)


def _read_mpi(variables: _Variables) -> Environment:
    """Open MPI names neither rank 0's host nor nodes: ranks are taken to fill node after node."""
    prefix = "OMPI_COMM_WORLD_"
    rank, world_size = _rank_and_size(variables, prefix + "RANK", prefix + "SIZE")
    why = f"{prefix}RANK={rank} is"
    local_size = variables.number(prefix + "LOCAL_SIZE", least=1, why=why)
    local_rank = variables.number(prefix + "LOCAL_RANK", why=why)
    _check_range(prefix + "LOCAL_RANK", local_rank, prefix + "LOCAL_SIZE", local_size)
    _check_range(prefix + "LOCAL_SIZE", local_size, prefix + "SIZE", world_size, first=1)
    if local_size == world_size:
        address = variables.text("MASTER_ADDR") or "127.0.0.1"
    else:
        address = variables.needed(
            "MASTER_ADDR",
            f"{world_size} ranks, {local_size} on this node, span several nodes and Open MPI does "
            "not say where rank 0 is: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 ...",
        )
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") or ""
    nodes = (rank // local_size, ceil(world_size / local_size))
    place = (rank, world_size, local_rank, local_size, *nodes)
    port = variables.port(_job_port(job))
    return Environment(*place, source="mpi", master_addr=address, master_port=port)


def _read_slurm(variables: _Variables) -> Environment:
    """A task of a step; rank 0 is on the first host of the step's node list."""
    # The SLURM_STEP_* variables come first: a step may be smaller than its job.
    size_name = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, world_size = _rank_and_size(variables, "SLURM_PROCID", size_name)
    why = f"SLURM_PROCID={rank} is"
    nodes_name = variables.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    num_nodes = variables.number(nodes_name, least=1, why=why)
    node_rank = variables.number("SLURM_NODEID", why=why)
    _check_range("SLURM_NODEID", node_rank, nodes_name, num_nodes)
    counts = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks = expand_counts(counts) if counts else (ceil(world_size / num_nodes),) * num_nodes
    if len(tasks) != num_nodes:
        raise ClusterError(
            f"Slurm's tasks per node, {counts!r}, describe {len(tasks)} nodes: "
            f"this contradicts {nodes_name}={num_nodes}"
        )
    local_rank = variables.number("SLURM_LOCALID", why=why)
    _check_range("SLURM_LOCALID", local_rank, "tasks on this node", tasks[node_rank])
    nodelist = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    address = variables.text("MASTER_ADDR") or expand_hosts(nodelist or "")[0]
    job = f"{variables.text('SLURM_JOB_ID')}.{variables.text('SLURM_STEP_ID', 'SLURM_STEPID')}"
    place = (rank, world_size, local_rank, tasks[node_rank], node_rank, num_nodes)
    port = variables.port(_job_port(job))
    return Environment(*place, source="slurm", master_addr=address, master_port=port)


def _rank_and_size(variables: _Variables, rank_name: str, size_name: str) -> tuple[int, int]:
    present = [f"{n}={variables.values[n]}" for n in (rank_name, size_name) if variables.any(n)]
    why = f"{' and '.join(present)} is (both or neither)"
    rank = variables.number(rank_name, why=why)
    size = variables.number(size_name, least=1, why=why)
    _check_range(rank_name, rank, size_name, size)
    return rank, size


def _check_range(name: str, value: int, limit_name: str, limit: int, first: int = 0) -> None:
    """``limit`` values are allowed, from ``first`` on."""
    if not first <= value < first + limit:
        raise ClusterError(
            f"{name}={value} contradicts {limit_name}={limit}: {name} must be "
            f"{first}..{first + limit - 1}"
        )


def _job_port(job: str) -> int:
    """A port that all ranks of one job derive alike, below the range the kernel hands out."""
    return 20_000 + zlib.crc32(job.encode()) % 10_000
