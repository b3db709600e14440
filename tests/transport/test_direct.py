"""The direct transport: sums in rank order, receives posted ahead, bytes as a ring, failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.strategy import Direct
from slipstream.transport import direct
from slipstream.transport.direct import DirectTransport
from slipstream.transport.requests import AllGather, AllReduce, ReduceScatter, sent_bytes
from slipstream.transport.work import Work
from tests.harness.ranks import RankFailure, Ranks

SIZES = [1, 0, 5, 4096, 100_003, 17, 300_000]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


@contextmanager
def opened() -> Iterator[DirectTransport]:
    transport = DirectTransport(Direct(), dist.group.WORLD)
    yield transport
    transport.close()
    dist.barrier()
    assert "slipstream-sum" not in {thread.name for thread in threading.enumerate()}


def tensors(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return [(10 * torch.randn(size, generator=random)).to(dtype) for size in SIZES]


def in_rank_order(tensor: torch.Tensor) -> torch.Tensor:
    """The plain reference: all tensors here, one added after the other."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensor)
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    total = every[0].to(wide)
    for other in every[1:]:
        total = total + other
    return total.to(tensor.dtype)


def exchange(transport: DirectTransport, given: Sequence[torch.Tensor], announce: bool) -> None:
    requests = [AllReduce(tensor) for tensor in given]
    if announce:
        transport.prepare(requests)
    works = [work for request in requests for work in transport.start(request)]
    for work in works:
        work.wait()
        assert work.get_future().done()


def sums(dtype: torch.dtype, ahead: int, window: int) -> None:
    with patch.multiple(direct, AHEAD=ahead, WINDOW=window), opened() as transport:
        for step in range(4):
            given = tensors(dtype, step)
            expected = [in_rank_order(tensor) for tensor in given]
            exchange(transport, given, announce=step % 2 == 0)
            for tensor, total in zip(given, expected, strict=True):
                assert torch.equal(tensor, total)


def sums_of_all() -> None:
    for dtype in DTYPES:
        sums(dtype, direct.AHEAD, direct.WINDOW)


def test_sums_are_taken_in_rank_order(ranks: Ranks) -> None:
    ranks.run(sums_of_all)


@pytest.mark.parametrize("ahead", [0, 100_000])
def test_sums_are_right_where_memory_lets_few_pieces_in(ranks: Ranks, ahead: int) -> None:
    ranks.run(sums, torch.float32, ahead, 1)


def halves(dtype: torch.dtype) -> None:
    """A reduce-scatter and an all-gather, announced and not, by turns with all-reduces."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    with opened() as transport:
        for step in range(4):
            widths = [1, 17, 4096]
            sums, rows = tensors(dtype, step), [r for n in widths for r in [torch.ones(world, n)]]
            scattered = [((rank + 1 + i) * r).to(dtype) for i, r in enumerate(rows)]
            outs = [torch.empty(n, dtype=wide) for n in widths]
            gathered = [torch.empty(world, n, dtype=dtype) for n in widths]
            sent = [torch.full((n,), rank, dtype=dtype) for n in widths]
            sent[-1] = gathered[-1][rank].fill_(rank)  # from where it arrives elsewhere
            expected = [in_rank_order(tensor) for tensor in sums]
            requests: list[Any] = [AllReduce(tensor) for tensor in sums]
            requests += map(ReduceScatter, scattered, outs)
            requests += map(AllGather, sent, gathered)
            if step % 2:
                transport.prepare(requests)
            for work in [work for request in requests for work in transport.start(request)]:
                work.wait()
            assert all(map(torch.equal, sums, expected))
            for i, out in enumerate(outs):
                assert torch.equal(out, torch.full_like(out, sum(range(1 + i, world + 1 + i))))
            for all_rows in gathered:
                assert [set(row.tolist()) for row in all_rows] == [{float(r)} for r in range(world)]


def halves_of_all() -> None:
    for dtype in DTYPES:
        halves(dtype)


def test_halves_of_an_all_reduce(ranks: Ranks) -> None:
    ranks.run(halves_of_all)


@contextmanager
def messages() -> Iterator[list[tuple[str, int]]]:
    """What is sent and received in this process while it lasts, with its bytes."""
    log: list[tuple[str, int]] = []
    plain = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def noted(name: str) -> Any:
        def call(tensor: torch.Tensor, **where: Any) -> Any:
            log.append((name, tensor.nbytes))
            return plain[name](tensor, **where)

        return call

    with patch.multiple(dist, **{name: noted(name) for name in plain}):
        yield log


def posted_ahead() -> None:
    with opened() as transport:
        given = tensors(torch.float32, 0)
        requests = [AllReduce(tensor) for tensor in given]
        with messages() as log:
            transport.prepare(requests)
        receives = 2 * (dist.get_world_size() - 1)
        assert {name for name, _ in log} == {"irecv"}
        assert len(log) <= receives * len(given)
        assert sum(size for _, size in log) >= sum(t.nbytes for t in given)
        works = []
        with messages() as log:
            works = [work for request in requests for work in transport.start(request)]
            for work in works:
                work.wait()
        assert {name for name, _ in log} == {"isend"}


def test_all_receives_are_posted_before_the_first_tensor_is_sent(ranks: Ranks) -> None:
    ranks.run(posted_ahead)


def received_ahead(ahead: int) -> int:
    """Bytes of pieces whose receives were posted before anything was sent."""
    with patch.object(direct, "AHEAD", ahead), opened() as transport:
        given = [torch.ones(4096) for _ in range(10)]
        with messages() as log:
            transport.prepare([AllReduce(tensor) for tensor in given])
        exchange(transport, given, announce=False)
        world = dist.get_world_size()
        of_sums = sum(t.nbytes for t in given) * (world - 1) / world
        return round(sum(size for _, size in log) - of_sums)


def test_pieces_received_ahead_stay_within_their_memory(ranks: Ranks) -> None:
    one = 4 * 4096 * (ranks.size - 1) / ranks.size  # pieces of one tensor's share
    for bytes_ahead in ranks.run(received_ahead, 40_000):
        assert bytes_ahead <= max(40_000, one) + 64 * ranks.size
        assert bytes_ahead > 40_000 - one - 64 * ranks.size


def bytes_sent() -> tuple[int, float]:
    world = dist.get_world_size()
    requests: list[Any] = [
        AllReduce(torch.ones(2**16)),
        AllReduce(torch.ones(2**18)),
        ReduceScatter(torch.ones(world, 2**14), torch.ones(2**14)),
        AllGather(torch.ones(2**14), torch.ones(world, 2**14)),
    ]
    with opened() as transport, messages() as log:
        transport.prepare(requests)
        for work in [work for request in requests for work in transport.start(request)]:
            work.wait()
    expected = sum(sent_bytes(request, world) for request in requests)
    return sum(size for name, size in log if name == "isend"), expected


def test_it_sends_what_a_ring_sends(ranks: Ranks) -> None:
    for sent, expected in ranks.run(bytes_sent):
        assert sent == pytest.approx(expected, rel=1e-3)


def killed(between_phases: bool) -> None:
    """The last rank dies before it sends, or after that and before its sums; what others see."""
    transport = DirectTransport(Direct(), dist.group.WORLD)
    requests = [AllReduce(torch.ones(2**20)) for _ in range(3)]
    transport.prepare(requests)
    if dist.get_rank() == dist.get_world_size() - 1:
        if between_phases:
            with patch.object(direct, "add_in_order", lambda *_: os._exit(1)):
                transport.start(requests[0])[0].wait()
        os._exit(1)
    works: list[Work] = []
    with suppress(RuntimeError):  # the news may come before all are on their way
        for request in requests:
            works += transport.start(request)
    assert works
    for work in works:  # each of them ends
        with pytest.raises(RuntimeError):
            work.wait()
    with pytest.raises(RuntimeError, match="an earlier exchange failed"):
        transport.start(AllReduce(torch.ones(1)))
    transport.close()


@pytest.mark.parametrize("between_phases", [False, True])
def test_a_rank_that_is_killed_ends_all_works_of_the_others(
    ranks: Ranks, between_phases: bool
) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(killed, between_phases, timeout=60)
    assert failure.value.errors == {ranks.size - 1: "the process died"}, failure.value
