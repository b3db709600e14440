"""Two real ranks join, by a group of their own or the script's; what is made is destroyed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from slipstream.cluster.connect import Cluster, agree_on_start, connect, from_environ, local_gpu
from slipstream.cluster.environment import Environment
from slipstream.errors import ClusterError
from tests.harness.ranks import Ranks


def summed(cluster: Cluster) -> float:
    total = torch.tensor([cluster.rank + 1.0])
    dist.all_reduce(total, group=cluster.world)
    return total.item()


def own_world() -> tuple[object, ...]:
    cluster = connect(from_environ(), "cpu")
    seen = (cluster.rank, cluster.world_size, cluster.owns_world, summed(cluster), cluster.hosts)
    cluster.close()
    cluster.close()
    return (*seen, dist.is_initialized())


def test_a_world_is_made_from_the_environment_and_destroyed(two: Ranks) -> None:
    hosts = (socket.gethostname(),) * 2
    assert two.run(own_world, connect=False) == [
        (rank, 2, True, 3.0, hosts, False) for rank in (0, 1)
    ]


def late_to_each(rank: int) -> list[float]:
    sums = []
    for _ in range(3):
        time.sleep(0.3 * (int(os.environ["RANK"]) == rank))
        cluster = connect(from_environ(), "cpu")
        sums.append(summed(cluster))
        cluster.close()
    return sums


@pytest.mark.parametrize("host", ["rank 0", "the launcher"])
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_connect_repeatedly_even_if_one_is_late(two: Ranks, late: int, host: str) -> None:
    env = {}
    if host == "the launcher":  # as torchrun does: its store outlives every meeting
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert two.run(late_to_each, late, connect=False, env=env) == [[3.0] * 3] * 2


def scripts_world() -> tuple[object, ...]:
    before = dict(os.environ)
    cluster = connect(from_environ(), "cpu")
    environment = cluster.environment
    both, mine = cluster.new_group(), cluster.new_group([1])
    known = dist.get_world_size(both), mine is not None
    sums = summed(cluster)
    cluster.close()
    destroyed = both not in dist.distributed_c10d._world.pg_map
    return (
        environment.rank,
        environment.world_size,
        environment.local_rank,
        environment.local_world_size,
        cluster.owns_world,
        known,
        sums,
        destroyed,
        dist.is_initialized(),
        os.environ == before,
    )


UNSET = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "")
OTHERS = {
    "no launcher": {},
    "another launcher": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "elsewhere"},
    "Lightning's launcher": {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"},
}


@pytest.mark.parametrize("variables", OTHERS.values(), ids=OTHERS)
def test_a_group_of_the_script_is_used_and_not_destroyed(
    two: Ranks, variables: dict[str, str]
) -> None:
    assert two.run(scripts_world, env=UNSET | variables) == [
        (rank, 2, rank, 2, False, (2, rank == 1), 3.0, True, True, True) for rank in (0, 1)
    ]


def script_destroys_first() -> bool:
    cluster = connect(from_environ(), "cpu")
    cluster.new_group()
    dist.barrier()  # the other rank has the group, too: it makes no connections any more
    dist.destroy_process_group()
    cluster.close()
    return dist.is_initialized()


def test_a_script_may_destroy_everything_before_close(two: Ranks) -> None:
    assert two.run(script_destroys_first, connect=False) == [False, False]


def script_begins_anew() -> tuple[float, bool]:
    before = connect(from_environ(), "cpu")
    before.new_group()
    dist.barrier()
    dist.destroy_process_group()
    again = connect(from_environ(), "cpu")
    before.close()
    total = summed(again)
    again.close()
    return total, dist.is_initialized()


def test_a_script_may_begin_anew_before_close(two: Ranks) -> None:
    assert two.run(script_begins_anew, connect=False) == [(3.0, False)] * 2


def both_in_one_world() -> tuple[float, bool, bool]:
    first, second = connect(from_environ(), "cpu"), connect(from_environ(), "cpu")
    first.close()
    first.close()
    total, lives = summed(second), dist.is_initialized()
    second.close()
    return total, lives, dist.is_initialized()


def test_a_world_ends_with_the_last_who_uses_it(two: Ranks) -> None:
    assert two.run(both_in_one_world, connect=False) == [(3.0, True, False)] * 2


def test_one_process_without_a_launcher_makes_no_group() -> None:
    cluster = connect(Environment(host="here"), "cpu")
    assert (cluster.world, cluster.new_group()) == (None, None)
    assert (cluster.rank, cluster.world_size, cluster.hosts) == (0, 1, ("here",))
    cluster.close()
    assert not dist.is_initialized()


def test_a_failed_rendezvous_names_rank_address_and_what_to_check() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: nobody answers
        alone = Environment(
            rank=1,
            world_size=2,
            node_rank=1,
            num_nodes=2,
            host="localhost",
            source="torchrun",
            master_addr="127.0.0.1",
            master_port=taken.getsockname()[1],
        )
        with pytest.raises(ClusterError) as error:
            connect(alone, "cpu", timeout=timedelta(seconds=1))
    message = str(error.value)
    where = f"127.0.0.1:{alone.master_port}"
    for part in ("rank 1 of 2 on localhost", where, "timeout 1 s", "GLOO_SOCKET_IFNAME"):
        assert part in message
    assert not dist.is_initialized()


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = Environment(source="torchrun", master_addr="127.0.0.1", master_port=port)
    words = "^GLOO_SOCKET_IFNAME=none7: localhost has no such network interface.*one of .*lo"
    with pytest.raises(ClusterError, match=words):
        connect(alone, "cpu", timeout=timedelta(seconds=20))


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(0, 1, 0), (3, 8, 3), (3, 1, 0)])
def test_a_rank_gets_the_gpu_of_its_local_rank_or_the_only_one(
    local_rank: int, visible: int, index: int
) -> None:
    assert local_gpu(Environment(local_rank=local_rank), visible) == index


@pytest.mark.parametrize("visible", [0, 2])
def test_more_ranks_than_gpus_is_an_error(visible: int) -> None:
    with pytest.raises(ClusterError, match=f"rank 7 on here has local rank 2, but sees {visible}"):
        local_gpu(Environment(rank=7, local_rank=2, host="here"), visible)


def test_ranks_agree_on_a_start_whatever_the_dead_have_said() -> None:
    store, timeout = HashStore(), timedelta(seconds=30)
    for number in range(2):
        with ThreadPoolExecutor(3) as pool:
            late = [pool.submit(agree_on_start, store, rank, 3, timeout) for rank in (0, 1)]
            time.sleep(0.1 * number)  # the first one reads what rank 2 said in its earlier life
            late.append(pool.submit(agree_on_start, store, 2, 3, timeout))
            words = {one.result() for one in late}
        assert len(words) == 1
    with pytest.raises(RuntimeError, match="rank 1 has not come"):
        agree_on_start(HashStore(), 0, 2, timedelta(seconds=0.1))


def test_ranks_that_a_script_starts_without_a_group_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    connect(Environment(), "cpu").close()  # as a notebook on a cluster
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a script")
    with pytest.warns(UserWarning, match=r"trains alone.*dist\.init_process_group"):
        connect(Environment(), "cpu").close()
