"""The hierarchical transport: sums inside hosts, then between them; any numbering, any numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import ClusterError, MismatchError
from slipstream.strategy import FlatConfig, GradientsConfig, HierarchicalConfig
from slipstream.transport import hierarchical, host_memory, hosts
from slipstream.transport.hierarchical import HierarchicalTransport
from slipstream.transport.hosts import find_hosts
from slipstream.transport.requests import AllGather, AllReduce
from tests.harness import transports
from tests.harness.ranks import RankFailure, Ranks
from tests.harness.transports import die, in_order, of_all_ranks, tensors
from tests.transport.emulated_hosts import on_hosts

DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64]

# The host of each rank.
EQUAL = {
    "1 x 2": [0, 0],
    "1 x 3": [0, 0, 0],
    "2 x 1": [0, 1],
    "3 x 1": [0, 1, 2],
    "2 x 2": [0, 0, 1, 1],
    "2 x 2, permuted": [0, 1, 0, 1],
    "2 x 3, permuted": [1, 0, 0, 1, 0, 1],
    "3 x 2": [0, 0, 1, 1, 2, 2],
    "3 x 2, permuted": [2, 1, 0, 1, 2, 0],
}
UNEQUAL = {
    "2 + 1": [0, 0, 1],
    "1 + 3": [0, 1, 1, 1],
    "3 + 2 + 1, permuted": [1, 0, 2, 1, 0, 1],
}


@pytest.fixture(scope="module")
def six() -> Iterator[Ranks]:
    with Ranks(6) as ranks:
        yield ranks


@contextmanager
def opened(
    where: Sequence[int], between: str = "direct"
) -> Iterator[tuple[HierarchicalTransport | None, dist.ProcessGroup]]:
    """The transport on the first ranks of the world; None on the others."""
    ranks = range(len(where))
    group = dist.new_group([*ranks])
    if dist.get_rank() in ranks:
        with on_hosts(where):
            transport = HierarchicalTransport(
                GradientsConfig(transport={"kind": "hierarchical", "between": between}).transport,
                group,
            )
        with transports.opened(transport):
            yield transport, group
    else:
        yield None, group
        dist.barrier()


def by_hosts(tensor: torch.Tensor, where: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The plain reference: the sum of each host in rank order, then the sum of the hosts."""
    every = of_all_ranks(tensor, group)
    nodes = [[t for t, host in zip(every, where, strict=True) if host == h] for h in where]
    return in_order([in_order(nodes[where.index(host)]) for host in dict.fromkeys(where)])


def exchange(transport: HierarchicalTransport, given: Sequence[torch.Tensor], ahead: bool) -> None:
    transports.exchange(transport, [AllReduce(tensor) for tensor in given], announce=ahead)


def sums(where: Sequence[int], dtype: torch.dtype, small: bool) -> None:
    part, chunk = (100_000, 4096) if small else (hierarchical.PART, host_memory.MOST)
    patched = (
        patch.object(hierarchical, "PART", part),
        patch.multiple(host_memory, MOST=chunk, SLOTS=2),
    )
    with patched[0], patched[1], opened(where) as (transport, group):
        for step in range(2 if transport else 0):
            assert transport
            given = tensors(dtype, step)
            expected = [by_hosts(tensor, where, group) for tensor in given]
            exchange(transport, given, ahead=step % 2 == 0)
            for tensor, total in zip(given, expected, strict=True):
                assert torch.equal(tensor, total)


def all_sums(cases: Sequence[tuple[Sequence[int], torch.dtype, bool]]) -> None:
    for case in cases:  # in one meeting of the ranks, which takes as long as a case
        sums(*case)


def test_sums_are_taken_by_hosts_in_order(six: Ranks) -> None:
    """On any hosts in small parts, and in parts of the usual size on an odd numbering of them."""
    cases = [(where, torch.float32, True) for where in (EQUAL | UNEQUAL).values()]
    odd = EQUAL["2 x 3, permuted"], UNEQUAL["3 + 2 + 1, permuted"]
    six.run(all_sums, cases + [(where, torch.float32, False) for where in odd])


def test_dtypes(six: Ranks) -> None:
    where = UNEQUAL["3 + 2 + 1, permuted"]
    six.run(all_sums, [(where, dtype, True) for dtype in DTYPES])


def by_the_backend(where: Sequence[int]) -> list[list[bytes]]:
    """What comes out of two equal steps, after a check that it is the sum within rounding."""
    found = []
    with opened(where, "flat") as (transport, group):
        for _ in range(2 if transport else 0):
            assert transport
            given = tensors(torch.float32, 0)
            expected = [by_hosts(tensor, where, group) for tensor in given]
            exchange(transport, given, ahead=True)
            for tensor, total in zip(given, expected, strict=True):
                torch.testing.assert_close(tensor, total, rtol=1e-5, atol=1e-4)
            found.append([tensor.numpy().tobytes() for tensor in given])
    return found


@pytest.mark.parametrize("name", ["1 x 2", "3 x 1", "2 x 3, permuted", "3 x 2"])
def test_between_flat_gives_the_same_bits_on_all_ranks_and_again(six: Ranks, name: str) -> None:
    where = EQUAL[name]
    first, *others = six.run(by_the_backend, where)[: len(where)]
    assert first[0] == first[1]
    assert all(other == first for other in others)


def unequal_flat() -> None:
    with on_hosts([0, 0, 1, 1, 1, 2]):
        HierarchicalTransport(HierarchicalConfig(between=FlatConfig()), dist.group.WORLD)


def test_between_flat_refuses_hosts_of_different_numbers_of_ranks(six: Ranks) -> None:
    for error in six.fail(unequal_flat).values():
        assert isinstance(error, ClusterError)
        assert "they have [2, 3, 1]; write between: direct" in str(error)


def groups_of_its_own() -> None:
    if dist.get_rank() == 2:
        dist.new_group([2], use_local_synchronization=True)
    with on_hosts([0, 0, 0, 1, 1, 1]):
        HierarchicalTransport(HierarchicalConfig(between=FlatConfig()), dist.group.WORLD)


def test_between_flat_refuses_ranks_with_different_numbers_of_groups(six: Ranks) -> None:
    """torch would wait for ever: it names a rail's group by how many its ranks have."""
    for error in six.fail(groups_of_its_own).values():
        assert isinstance(error, MismatchError)
        assert "between: direct" in str(error)


def bytes_sent(where: Sequence[int], numel: int) -> int:
    """Bytes that this rank sends through the network in one all-reduce."""
    plain, sent = dist.isend, 0

    def noted(tensor: torch.Tensor, **how: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return plain(tensor, **how)

    with opened(where) as (transport, _), patch.object(dist, "isend", noted):
        if transport:
            exchange(transport, [torch.ones(numel)], ahead=True)
    return sent


@pytest.mark.parametrize("name", ["1 x 3", "2 x 2, permuted", "3 x 2", "3 + 2 + 1, permuted"])
def test_each_host_sends_what_one_rank_would(six: Ranks, name: str) -> None:
    where, numel = (EQUAL | UNEQUAL)[name], 3 * 2**16
    sent = six.run(bytes_sent, where, numel)
    num_hosts = len(set(where))
    for host in range(num_hosts):
        of_host = sum(s for s, h in zip(sent, where, strict=False) if h == host)
        formula = 2 * (num_hosts - 1) / num_hosts * 4 * numel
        assert of_host == pytest.approx(formula, rel=1e-2)


def other_requests(where: Sequence[int]) -> None:
    with opened(where) as (transport, _):
        assert transport
        rows = torch.empty(6, 3)
        for work in transport.start(AllGather(torch.full((3,), float(dist.get_rank())), rows)):
            work.wait()
        assert torch.equal(rows, torch.arange(6.0).view(6, 1).expand(6, 3))


def test_other_requests_travel_as_flat_sends_them(six: Ranks) -> None:
    six.run(other_requests, EQUAL["3 x 2"])


def found_hosts(where: Sequence[int]) -> tuple[Any, ...]:
    """Hosts by the names bound on them, whatever the environment says."""
    with on_hosts(where), patch.dict(os.environ, LOCAL_WORLD_SIZE="6"):
        found = find_hosts(dist.group.WORLD, 2)
    found.close()
    return found.nodes, found.neighbours, [sorted(line) for line in found.lines]


def test_hosts_are_found_and_connected(six: Ranks) -> None:
    where = [1, 0, 2, 1, 0, 1]
    for rank, (nodes, neighbours, lines) in enumerate(six.run(found_hosts, where)):
        assert nodes == ((0, 3, 5), (1, 4), (2,))
        assert neighbours == next(node for node in nodes if rank in node)
        assert lines == [[r for r in neighbours if r != rank]] * 2


def a_stranger_calls() -> tuple[tuple[int, ...], ...]:
    """Another process connects to every rank's name, says nonsense, and is dropped."""
    plain = hosts._call

    def call(cards: Any, rank: int, connected: Any) -> None:
        for name, _ in cards:
            hosts._call = plain
            strangers: list[dict[int, Any]] = [{}]
            plain([(name, b"0" * 16)], 0, strangers)
            strangers[0][0].close()
        plain(cards, rank, connected)

    with patch.object(hosts, "_call", call):
        found = find_hosts(dist.group.WORLD, 1)
    found.close()
    return found.nodes


def test_strangers_are_dropped(six: Ranks) -> None:
    assert six.run(a_stranger_calls) == [((0, 1, 2, 3, 4, 5),)] * 6


def mute() -> None:
    """Rank 5 says that it has connected, and has not."""

    def call(cards: Any, rank: int, connected: Any) -> None:
        connected[0].update(dict.fromkeys(range(rank))) if rank == 5 else plain(
            cards, rank, connected
        )

    plain = hosts._call
    with patch.object(hosts, "HELLO_SECONDS", 0.3), patch.object(hosts, "_call", call):
        find_hosts(dist.group.WORLD, 1)


def test_a_host_with_fewer_ranks_than_announced_is_an_error_on_all(six: Ranks) -> None:
    for rank, error in six.fail(mute).items():
        if rank == 5:
            assert "cannot connect to the ranks of its host" in str(error)
        else:
            assert isinstance(error, ClusterError)
            assert f"rank {rank} cannot connect to the ranks of its host" in str(error)
            assert "timed out" in str(error)


def killed(where: Sequence[int], between_phases: bool) -> None:
    """The last rank is killed before it starts, or once its host's sums are there."""
    with on_hosts(where):
        transport = HierarchicalTransport(HierarchicalConfig(), dist.group.WORLD)
    place = patch.object(transport, "_exchange", die)
    transports.killed(transport, place if between_phases else None)


@pytest.mark.parametrize("between_phases", [False, True])
@pytest.mark.parametrize("name", ["3 x 2", "2 x 3, permuted"])
def test_a_rank_that_is_killed_ends_all_works_of_the_others(
    six: Ranks, name: str, between_phases: bool
) -> None:
    with pytest.raises(RankFailure) as failure:
        six.run(killed, EQUAL[name], between_phases)
    assert failure.value.errors == {5: "the process died"}, failure.value
