"""The flat transport: each request begun by the call, its result there when its works are done."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from slipstream.strategy import AutoConfig, FlatConfig, TransportConfig
from slipstream.transport.requests import AllGather, AllReduce, AllToAll, Broadcast, Request
from slipstream.transport.transport import TRANSPORTS, make_transport
from tests.harness.ranks import Ranks


def carried_out(request: Request) -> int:
    transport = make_transport(FlatConfig(), dist.group.WORLD)
    works = transport.start(request)
    for work in works:
        work.wait()
    transport.close()
    transport.close()
    return len(works)


def all_reduced(size: int) -> tuple[int, bool]:
    tensor = torch.arange(float(size)) * (dist.get_rank() + 1)
    works = carried_out(AllReduce(tensor))
    return works, torch.equal(tensor, torch.arange(float(size)) * 3)


def test_an_all_reduce_replaces_the_tensor_by_the_sum(two: Ranks) -> None:
    for size in (0, 1, 7, 1000):
        assert two.run(all_reduced, size) == [(1, True)] * 2


def rearranged(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    send = torch.tensor([[0, 1, 2], [10, 11, 12]]).add(100 * rank).to(dtype)
    receive = torch.zeros_like(send)
    carried_out(AllToAll(send, receive))
    mine = torch.tensor([0, 1, 2]) + 10 * rank
    assert torch.equal(receive, torch.stack([mine, mine + 100]).to(dtype))
    carried_out(AllGather(send[0], receive))
    assert torch.equal(receive, torch.tensor([[0, 1, 2], [100, 101, 102]]).to(dtype))
    carried_out(Broadcast(send))
    assert torch.equal(send, torch.tensor([[0, 1, 2], [10, 11, 12]]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bfloat16, torch.complex64])
def test_rows_are_swapped_gathered_and_broadcast(two: Ranks, dtype: torch.dtype) -> None:
    two.run(rearranged, dtype)


def test_every_transport_of_the_strategy_has_a_road() -> None:
    variants = get_args(TransportConfig)[0]
    # auto is a choice among the others: a search switches between them
    assert set(TRANSPORTS) == set(get_args(variants)) - {AutoConfig}
