"""The ring transport: sums along the ring, receives posted ahead, failures go round."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.strategy import Ring
from slipstream.transport import ahead, ring
from slipstream.transport.requests import AllReduce, Broadcast
from slipstream.transport.ring import RingTransport
from tests.harness.ranks import RankFailure, Ranks
from tests.harness.transports import (
    check_bytes_sent,
    check_halves,
    check_receives_come_first,
    die,
    exchange,
    killed,
    messages,
    of_all_ranks,
    opened,
    received_ahead,
    tensors,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def along_the_ring(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The plain reference: each share's sum begins right of its owner, and ends with it."""
    every = of_all_ranks(tensor, group)
    shares = [ahead.cut_into_shares(one, len(every)) for one in every]
    sums = []
    for owner in range(len(every)):
        first, *others = [*shares[owner + 1 :], *shares[: owner + 1]]
        total = first[owner].clone()
        for other in others:
            total += other[owner]
        sums.append(total)
    return torch.cat(sums)


def check_sums(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    transport = RingTransport(Ring(), group)
    for step in range(2):
        given = tensors(dtype, step)
        expected = [along_the_ring(tensor, group) for tensor in given]
        exchange(transport, [AllReduce(tensor) for tensor in given], announce=step == 0)
        assert all(map(torch.equal, given, expected))
    check_halves(transport, dtype, group)
    transport.close()


def check_memory() -> None:
    """Partial sums that are received before anything is sent."""
    with opened(RingTransport(Ring(), dist.group.WORLD)) as transport:
        received, results = received_ahead(transport, 40_000)
    assert 40_000 - results / 10 <= received / 2 <= 40_000  # as many sums come as partial sums


def check_late_starts() -> None:
    """One rank begins the second tensor when the first is done, the others at once."""
    with opened(RingTransport(Ring(), dist.group.WORLD)) as transport:
        for late in range(dist.get_world_size()):
            requests = [AllReduce(torch.ones(4096)) for _ in range(2)]
            works = [*transport.start(requests[0])]
            if dist.get_rank() == late:
                works[0].wait()
            works += transport.start(requests[1])
            for work in works:
                work.wait()


def check_others(transport: RingTransport) -> None:
    """What is not sent round the ring travels as ``flat`` sends it."""
    tensor = torch.full((5,), float(dist.get_rank()))
    with messages() as log:
        exchange(transport, [Broadcast(tensor)])
    assert not tensor.any()
    assert not log


def battery() -> None:
    """In one meeting of the ranks."""
    world = dist.group.WORLD
    for dtype in DTYPES:
        check_sums(world, dtype)
    for size in (1, 2, 3):
        group = dist.new_group([*range(size)])
        if dist.get_rank() < size:
            check_sums(group, torch.bfloat16)
    for num_bytes, window in ((0, 8), (100_000, 8), (100_000, 1)):
        with patch.object(ahead, "AHEAD", num_bytes), patch.object(ring, "WINDOW", window):
            check_sums(world, torch.float32)
    check_memory()
    check_late_starts()
    with opened(RingTransport(Ring(), world)) as transport:
        check_receives_come_first(transport)
        check_bytes_sent(transport)
        check_others(transport)


def test_sums_halves_messages_and_memory() -> None:
    with Ranks(5) as five:
        five.run(battery)


def dying(between_phases: bool) -> None:
    plain = RingTransport._send

    def send(transport: RingTransport, entry: ring._Exchange, message: int) -> None:
        if message == dist.get_world_size() - 1:  # the sum of the own share
            die()
        plain(transport, entry, message)

    place = patch.object(RingTransport, "_send", send) if between_phases else None
    killed(RingTransport(Ring(), dist.group.WORLD), place)


@pytest.mark.parametrize(("size", "between_phases"), [(2, True), (4, False), (4, True)])
def test_a_rank_that_is_killed_ends_all_works_of_the_others(
    size: int, between_phases: bool
) -> None:
    with Ranks(size) as ranks, pytest.raises(RankFailure) as failure:
        ranks.run(dying, between_phases, timeout=60)
    assert failure.value.errors == {size - 1: "the process died"}, failure.value
