"""What each launcher's variables say, as a table; what is wrong in them is named."""

from __future__ import annotations

import pytest

from slipstream.cluster.environment import Environment
from slipstream.errors import ClusterError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[08-09],gpu5",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
}
SALLOC = {name: SLURM[name] for name in ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_ID")}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}

# variables -> rank, world size, local rank, local world size, node rank, nodes, source, address
CASES = {
    "nothing": ({}, (0, 1, 0, 1, 0, 1, "none", None)),
    "unrelated": ({"HOME": "/root", "MASTER_ADDR": "node0"}, (0, 1, 0, 1, 0, 1, "none", None)),
    "empty": ({"RANK": "", "WORLD_SIZE": ""}, (0, 1, 0, 1, 0, 1, "none", None)),
    "torchrun": (TORCHRUN, (3, 4, 1, 2, 1, 2, "torchrun", "node0")),
    "torchrun of one": (
        TORCHRUN
        | dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        (0, 1, 0, 1, 0, 1, "torchrun", "node0"),
    ),
    "by hand, a rank a node": (BY_HAND, (1, 2, 0, 1, 1, 2, "torchrun", "node0")),
    "by hand, one node": (
        BY_HAND | {"MASTER_ADDR": "127.0.0.1"},
        (1, 2, 1, 2, 0, 1, "torchrun", "127.0.0.1"),
    ),
    "mpi": (MPI, (2, 3, 0, 2, 1, 2, "mpi", "node0")),
    "mpi, one node": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        (1, 2, 1, 2, 0, 1, "mpi", "127.0.0.1"),
    ),
    "slurm": (SLURM, (4, 5, 0, 1, 2, 3, "slurm", "n08")),
    "slurm, counts unknown": (
        {n: v for n, v in SLURM.items() if n != "SLURM_TASKS_PER_NODE"},
        (4, 5, 0, 2, 2, 3, "slurm", "n08"),
    ),
    "slurm, a step smaller than its job": (
        SLURM
        | {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_PROCID": "0",
            "SLURM_NODEID": "0",
        },
        (0, 1, 0, 1, 0, 1, "slurm", "n08"),
    ),
    "mpich, one process": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, 1, 0, 1, "none", None)),
    "mpich and torchrun": (TORCHRUN | {"PMI_SIZE": "4"}, (3, 4, 1, 2, 1, 2, "torchrun", "node0")),
    "a shell of salloc": (SALLOC, (0, 1, 0, 1, 0, 1, "none", None)),
    "a script of sbatch": (SBATCH, (0, 1, 0, 1, 0, 1, "none", None)),
    "torchrun inside srun": (SLURM | TORCHRUN, (3, 4, 1, 2, 1, 2, "torchrun", "node0")),
    "mpirun inside a job": (SLURM | MPI, (2, 3, 0, 2, 1, 2, "mpi", "node0")),
}


@pytest.mark.parametrize(("variables", "expected"), CASES.values(), ids=CASES)
def test_the_variables_of_each_launcher(
    variables: dict[str, str], expected: tuple[object, ...]
) -> None:
    seen = Environment.read(variables, host="here")
    assert seen.host == "here"
    assert (
        seen.rank,
        seen.world_size,
        seen.local_rank,
        seen.local_world_size,
        seen.node_rank,
        seen.num_nodes,
        seen.source,
        seen.master_addr,
    ) == expected
    assert (seen.master_port is None) == (seen.source == "none")


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


# variables -> what the error must name
WRONG = {
    "no world size": (without(TORCHRUN, "WORLD_SIZE"), ["WORLD_SIZE is not set", "RANK=3"]),
    "no rank": (without(TORCHRUN, "RANK"), ["RANK is not set", "WORLD_SIZE=4"]),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR is not set", "RANK=3"]),
    "no port": (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT is not set"]),
    "rank too large": (TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4", "0..3"]),
    "rank negative": (TORCHRUN | {"RANK": "-1"}, ["RANK='-1'", "at least 0"]),
    "rank no number": (TORCHRUN | {"RANK": "one"}, ["RANK='one'", "integer"]),
    "empty world": (TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "at least 1"]),
    "local rank": (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
    "local size": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
        ["LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4"],
    ),
    "node rank": (TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2"]),
    "port": (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1..65535"]),
    "mpi on nodes": (without(MPI, "MASTER_ADDR"), ["MASTER_ADDR", "3 ranks", "mpirun -x"]),
    "mpi without size": (
        without(MPI, "OMPI_COMM_WORLD_SIZE"),
        ["OMPI_COMM_WORLD_SIZE is not set", "OMPI_COMM_WORLD_RANK=2"],
    ),
    "slurm rank": (SLURM | {"SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "SLURM_NTASKS=5"]),
    "slurm node": (SLURM | {"SLURM_NODEID": "3"}, ["SLURM_NODEID=3", "SLURM_NNODES=3"]),
    "slurm local": (SLURM | {"SLURM_LOCALID": "1"}, ["SLURM_LOCALID=1", "0..0"]),
    "slurm counts": (SLURM | {"SLURM_TASKS_PER_NODE": "2,2"}, ["'2,2'", "SLURM_NNODES=3"]),
    "slurm hosts": (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, ["'n[1-'", "n[01-03,7]"]),
    "mpich": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ["PMI_SIZE=4", "RANK=$PMI_RANK"]),
    "slurm without tasks": (without(SLURM, "SLURM_NTASKS"), ["SLURM_NTASKS", "SLURM_PROCID=4"]),
}


@pytest.mark.parametrize(("variables", "named"), WRONG.values(), ids=WRONG)
def test_a_wrong_variable_is_named_with_its_value(
    variables: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(ClusterError) as error:
        Environment.read(variables)
    assert [part for part in named if part not in str(error.value)] == []


def test_ranks_of_a_job_derive_one_port_and_jobs_different_ones() -> None:
    def port(**changed: str) -> int | None:
        return Environment.read(SLURM | changed).master_port

    assert port() == port(SLURM_PROCID="0", SLURM_NODEID="0")
    assert len({port(SLURM_JOB_ID=str(job)) for job in range(20)}) > 15
    assert port(SLURM_STEP_ID="1") != port()
    assert port(MASTER_PORT="1234") == 1234
