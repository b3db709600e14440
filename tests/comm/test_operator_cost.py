"""Without ``check`` an operator does nothing but its collective: no copies, no signatures."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

import slipstream.comm as comm
from slipstream.comm.signature import Signature
from tests.harness.dispatched import Dispatched
from tests.harness.ranks import Ranks

SIZE = 2


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with Ranks(SIZE) as ranks:
        yield ranks


VIEWS = {"aten::view", "aten::split_with_sizes", "aten::detach"}
ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_like"}


def work(name: str, rows: int) -> list[str]:
    """The operations that touch the elements of a tensor, and the collectives."""
    group = comm.group(check=False)
    x = torch.ones(rows, 4)
    refused = AssertionError("a signature")
    with Dispatched() as log, patch.object(Signature, "of", side_effect=refused):
        getattr(comm, name)(x, group)
    return [word for word in log.operators if word not in VIEWS | ALLOCATIONS]


WORK = {
    "all_reduce_sum": ["aten::clone", "c10d::allreduce_"],
    "all_reduce_max": ["aten::clone", "c10d::allreduce_"],
    "all_gather": ["c10d::_allgather_base_"],
    "all_to_all": ["c10d::alltoall_base_"],
    "reduce_scatter_sum": ["c10d::recv_", "c10d::send", "aten::add_"],
}


@pytest.mark.parametrize("name", WORK)
def test_along_the_first_axis_nothing_is_copied_twice(team: Ranks, name) -> None:
    assert team.run(work, name, 4) == [WORK[name]] * SIZE


def test_large_pieces_are_sent_and_received(team: Ranks) -> None:
    operations = ["c10d::recv_", "c10d::send", "aten::copy_"]
    assert team.run(work, "all_to_all", 2**16) == [operations] * SIZE


def recorded_work() -> tuple[list[str], list[str]]:
    group = comm.group(check=False)
    x = torch.ones(4, 4, requires_grad=True)
    with Dispatched() as forward:
        y = comm.all_reduce_max(x, group)
    with Dispatched() as backward:
        y.backward(torch.ones_like(y))
    return forward.operators, backward.operators


def test_max_is_compared_in_backward_only(team: Ranks) -> None:
    for forward, backward in team.run(recorded_work):
        assert {"aten::eq", "aten::where"}.isdisjoint(forward)
        assert backward.count("aten::eq") == backward.count("aten::where") == 1
