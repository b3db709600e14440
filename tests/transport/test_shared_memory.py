"""Shared memory: sums in rank order, small memory, failures, and nothing left behind."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import ClusterError, MismatchError
from slipstream.strategy import SharedMemoryConfig
from slipstream.transport import host_memory, host_shares, hosts
from slipstream.transport.hosts import find_hosts
from slipstream.transport.requests import AllGather, AllReduce, Broadcast
from slipstream.transport.shared_memory import SharedMemoryTransport
from tests.harness import transports
from tests.harness.ranks import RankFailure, Ranks
from tests.harness.transports import die, in_rank_order, tensors
from tests.transport.emulated_hosts import on_hosts

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


@contextmanager
def opened() -> Iterator[SharedMemoryTransport]:
    with transports.opened(
        SharedMemoryTransport(SharedMemoryConfig(), dist.group.WORLD)
    ) as transport:
        yield transport
    assert not open_memory()


def open_memory() -> list[str]:
    """What of shared memory this process still has: files, and mappings."""
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd)]
    return [name for name in files if "memfd:slipstream" in name]


def exists(file: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{file}")  # listing the folder had one of its own


def exchange(transport: SharedMemoryTransport, given: Sequence[torch.Tensor]) -> None:
    transports.exchange(transport, [AllReduce(tensor) for tensor in given])


def sums(dtype: torch.dtype, chunk: int, slots: int) -> None:
    with patch.multiple(host_memory, MOST=chunk, SLOTS=slots), opened() as transport:
        for step in range(3):
            given = tensors(dtype, step)
            expected = [in_rank_order(tensor) for tensor in given]
            exchange(transport, given)
            for tensor, total in zip(given, expected, strict=True):
                assert torch.equal(tensor, total)


def all_sums(cases: Sequence[tuple[torch.dtype, int, int]]) -> None:
    for case in cases:  # in one meeting of the ranks, which takes as long as a case
        sums(*case)


def test_sums_are_taken_in_rank_order(ranks: Ranks) -> None:
    ranks.run(all_sums, [(d, host_memory.MOST, host_memory.SLOTS) for d in DTYPES])


def test_sums_are_right_in_many_small_chunks(ranks: Ranks) -> None:
    ranks.run(all_sums, [(torch.float32, 4096, slots) for slots in (1, 2, 7)])


def other_requests() -> None:
    with opened() as transport:
        world, rank = dist.get_world_size(), dist.get_rank()
        rows, first = torch.empty(world, 3), torch.full((5,), float(rank))
        for request in (AllGather(torch.full((3,), float(rank)), rows), Broadcast(first)):
            for work in transport.start(request):
                work.wait()
        assert torch.equal(rows, torch.arange(world).float().view(-1, 1).expand(-1, 3))
        assert torch.equal(first, torch.zeros(5))


def test_other_requests_travel_as_flat_sends_them(ranks: Ranks) -> None:
    ranks.run(other_requests)


def one_after_the_other() -> list[str]:
    """Transports opened and closed in turn, while files of a run that was killed lie about."""
    for _ in range(3):
        with opened() as transport:
            exchange(transport, [torch.ones(1000)])
    return [name for name in os.listdir("/dev/shm") if "slipstream" in name]


def test_nothing_is_left_and_nothing_left_matters(ranks: Ranks) -> None:
    assert ranks.run(one_after_the_other) == [[]] * ranks.size


def without_memory() -> None:
    """The first rank may make no files as large as the memory that it must share."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        SharedMemoryTransport(SharedMemoryConfig(), dist.group.WORLD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_host_without_memory_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    errors = ranks.fail(without_memory)
    assert isinstance(errors[0], ClusterError)
    text = str(errors[0])
    megabytes = {2: 4.0, 3: 18.0}[ranks.size]
    assert f"cannot reserve {megabytes} MB of memory to share with ranks [1" in text
    assert "File too large" in text
    assert "{transport: direct}" in text
    for rank in range(1, ranks.size):
        assert isinstance(errors[rank], MismatchError)
        assert "rank 0 cannot go on: ClusterError: rank 0 cannot reserve" in str(errors[rank])


def test_several_hosts_are_an_error_that_names_them(ranks: Ranks) -> None:
    where = [0] * (ranks.size - 1) + [1]
    for error in ranks.fail(elsewhere, where).values():
        assert isinstance(error, ClusterError)
        alone = ranks.size - 1
        assert f"by host they are [{list(range(alone))}, [{alone}]]" in str(error)
        assert "{transport: hierarchical}" in str(error)


def elsewhere(where: Sequence[int]) -> None:
    with on_hosts(where):
        SharedMemoryTransport(SharedMemoryConfig(), dist.group.WORLD)


def crossed() -> None:
    """The last rank reaches all others, which do not reach each other."""
    plain = hosts._call

    def call(cards: Any, rank: int, connected: Any) -> None:
        plain(cards if rank == dist.get_world_size() - 1 else [], rank, connected)

    with patch.object(hosts, "_call", call), patch.object(hosts, "HELLO_SECONDS", 0.5):
        find_hosts(dist.group.WORLD, 1)


def test_ranks_that_reach_each_other_only_in_part_are_an_error_on_all(ranks: Ranks) -> None:
    if ranks.size < 3:
        pytest.skip("needs a third rank")
    for error in ranks.fail(crossed).values():
        assert isinstance(error, ClusterError)
        assert "ranks [0, 1, 2] reach each other on a host only in part" in str(error)


def killed(when: str) -> None:
    """The last rank is killed; what the others see."""
    between = when == "between the stages"
    transports.killed(
        SharedMemoryTransport(SharedMemoryConfig(), dist.group.WORLD),
        patch.object(host_shares, "add_in_order", die) if between else None,
        first_may_end=between,  # all had put their values in: one rank may have its sum
        match="of this host has ended",
        later="has ended",
    )


@pytest.mark.parametrize("when", ["before it began", "between the stages"])
def test_a_rank_that_is_killed_ends_all_works_of_the_others(ranks: Ranks, when: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(killed, when)
    assert failure.value.errors == {ranks.size - 1: "the process died"}, failure.value


def silent() -> str:
    """The last rank never starts; the group waits for five seconds."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    transport = SharedMemoryTransport(SharedMemoryConfig(), group)
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            transport.start(AllReduce(torch.ones(8)))[0].wait()
        text = str(caught.value)
    dist.barrier()
    transport.close()
    return text


def test_a_silent_rank_is_waited_for_as_long_as_the_group_waits(three: Ranks) -> None:
    assert re.search(r"rank [12] of this host was silent for 5 s", three.run(silent)[0])
