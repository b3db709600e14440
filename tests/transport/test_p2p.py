"""Rows to and from every rank, receives posted before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.transport.p2p import start_all_to_all
from tests.harness.ranks import Ranks

TYPES = [torch.uint8, torch.float32, torch.complex64]


@pytest.fixture(scope="module", params=[1, 2, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


def swap(shape: tuple[int, ...], dtype: torch.dtype, members: int) -> torch.Tensor | None:
    """Row ``i`` of rank ``r`` is ``10 r + i``; exchanged by the first ``members`` ranks."""
    group = dist.new_group(list(range(members)))
    dist.barrier()  # a rank that is done must not leave while another still connects
    rank = dist.get_rank()
    if rank >= members:
        return None
    rows = [torch.full(shape, 10 * rank + i).to(dtype) for i in range(members)]
    send = torch.stack(rows)
    receive = torch.zeros_like(send)
    for _ in range(3):  # tags are the same each time: what follows must not overtake
        for work in start_all_to_all(receive.unbind(), send.unbind(), group):
            work.wait()
        assert torch.equal(send, torch.stack(rows))
    return receive


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (100_003,)])
def test_row_i_goes_to_rank_i(team: Ranks, shape, dtype) -> None:
    for members in {team.size, max(team.size - 1, 1)}:
        results = team.run(swap, shape, dtype, members)
        for rank, receive in enumerate(results[:members]):
            expected = [torch.full(shape, 10 * j + rank).to(dtype) for j in range(members)]
            assert torch.equal(receive, torch.stack(expected))
        assert results[members:] == [None] * (team.size - members)


def order_of_calls() -> list[str]:
    group = dist.new_group()
    calls: list[str] = []

    def noted(name: str):
        start = getattr(dist, name)

        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return start(*args, **kwargs)

        return patch.object(dist, name, call)

    rows = torch.zeros(dist.get_world_size(), 4)
    with noted("irecv"), noted("isend"):
        works = start_all_to_all(torch.empty_like(rows).unbind(), rows.unbind(), group)
    for work in works:
        work.wait()
    return calls


def test_all_receives_are_posted_before_the_first_send(team: Ranks) -> None:
    others = team.size - 1
    assert team.run(order_of_calls) == [["irecv"] * others + ["isend"] * others] * team.size
