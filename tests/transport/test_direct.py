"""The direct transport: sums in rank order, receives posted ahead, bytes as a ring, failures."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.strategy import DirectConfig
from slipstream.transport import ahead, direct
from slipstream.transport.direct import DirectTransport
from slipstream.transport.requests import AllReduce
from tests.harness.ranks import RankFailure, Ranks
from tests.harness.transports import (
    check_bytes_sent,
    check_halves,
    check_receives_come_first,
    die,
    exchange,
    in_rank_order,
    killed,
    opened,
    received_ahead,
    tensors,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


def made() -> DirectTransport:
    return DirectTransport(DirectConfig(), dist.group.WORLD)


def sums(dtype: torch.dtype, num_bytes: int, window: int) -> None:
    with (
        patch.object(ahead, "AHEAD", num_bytes),
        patch.object(direct, "WINDOW", window),
        opened(made()) as transport,
    ):
        for step in range(4):
            given = tensors(dtype, step)
            expected = [in_rank_order(tensor) for tensor in given]
            exchange(transport, [AllReduce(tensor) for tensor in given], announce=step % 2 == 0)
            assert all(map(torch.equal, given, expected))


def sums_of_all() -> None:
    for dtype in DTYPES:
        sums(dtype, ahead.AHEAD, direct.WINDOW)


def test_sums_are_taken_in_rank_order(ranks: Ranks) -> None:
    ranks.run(sums_of_all)


@pytest.mark.parametrize("num_bytes", [0, 100_000])
def test_sums_are_right_where_memory_lets_few_pieces_in(ranks: Ranks, num_bytes: int) -> None:
    ranks.run(sums, torch.float32, num_bytes, 1)


def halves_of_all() -> None:
    with opened(made()) as transport:
        for dtype in DTYPES:
            check_halves(transport, dtype)


def test_halves_of_an_all_reduce(ranks: Ranks) -> None:
    ranks.run(halves_of_all)


def messages_of_all() -> None:
    with opened(made()) as transport:
        check_receives_come_first(transport)
        check_bytes_sent(transport)


def test_receives_come_first_and_a_ring_sends_as_much(ranks: Ranks) -> None:
    ranks.run(messages_of_all)


def pieces_ahead(num_bytes: int) -> float:
    """Bytes of pieces whose receives were posted before anything was sent."""
    with opened(made()) as transport:
        received, results = received_ahead(transport, num_bytes)
    return received - results


def test_pieces_received_ahead_stay_within_their_memory(ranks: Ranks) -> None:
    one = 4 * 4096 * (ranks.size - 1) / ranks.size  # pieces of one tensor's share
    for bytes_ahead in ranks.run(pieces_ahead, 40_000):
        assert bytes_ahead <= max(40_000, one) + 64 * ranks.size
        assert bytes_ahead > 40_000 - one - 64 * ranks.size


def dying(between_phases: bool) -> None:
    """Before it sends, or after that and before its sums."""
    place = patch.object(direct, "add_in_order", die)
    killed(made(), place if between_phases else None)


@pytest.mark.parametrize("between_phases", [False, True])
def test_a_rank_that_is_killed_ends_all_works_of_the_others(
    ranks: Ranks, between_phases: bool
) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(dying, between_phases)
    assert failure.value.errors == {ranks.size - 1: "the process died"}, failure.value
