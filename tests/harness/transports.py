"""What tests of transports share: tensors, plain references, messages, ranks that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slipstream.transport import ahead
from slipstream.transport.requests import AllGather, AllReduce, ReduceScatter, Request, sent_bytes
from slipstream.transport.transport import Transport
from slipstream.transport.work import Work

SIZES = (1, 0, 5, 4096, 100_003, 17, 300_000)
HALVES = (torch.bfloat16, torch.float16)
AnyTransport = TypeVar("AnyTransport", bound=Transport)


@contextmanager
def opened(transport: AnyTransport) -> Iterator[AnyTransport]:
    """Close it at the end, on all ranks of the world; none of its threads is left."""
    yield transport
    transport.close()
    dist.barrier()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("slipstream")]


def tensors(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Other values on every rank."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return [(10 * torch.randn(size, generator=random)).to(dtype) for size in SIZES]


def of_all_ranks(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """By rank."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    if tensor.numel():
        dist.all_gather(every, tensor, group=group)
    return every


def in_order(given: Sequence[torch.Tensor]) -> torch.Tensor:
    """One added after the other; 16-bit floats in float32, rounded once."""
    total = given[0].float() if given[0].dtype in HALVES else given[0]
    for other in given[1:]:
        total = total + other
    return total.to(given[0].dtype)


def in_rank_order(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    return in_order(of_all_ranks(tensor))


def exchange(transport: Transport, requests: Sequence[Request], announce: bool = True) -> None:
    """Start all, and wait for all."""
    if announce:
        transport.prepare(requests)
    for work in [work for request in requests for work in transport.start(request)]:
        work.wait()
        assert work.get_future().done()


def check_halves(
    transport: Transport, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> None:
    """A reduce-scatter and an all-gather, announced and not, by turns with all-reduces."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    wide = torch.float32 if dtype in HALVES else dtype
    for step in range(4):
        widths = [1, 17, 4096]
        ones = [torch.full((n,), rank, dtype=dtype) for n in widths]
        rows = [((rank + 1 + i) * torch.ones(world, n)).to(dtype) for i, n in enumerate(widths)]
        outs = [torch.empty(n, dtype=wide) for n in widths]
        gathered = [torch.empty(world, n, dtype=dtype) for n in widths]
        sent = [torch.full((n,), rank, dtype=dtype) for n in widths]
        sent[-1] = gathered[-1][rank].fill_(rank)  # from where it arrives elsewhere
        requests = [
            *map(AllReduce, ones),
            *map(ReduceScatter, rows, outs),
            *map(AllGather, sent, gathered),
        ]
        if step % 2:
            transport.prepare(requests)
        for work in [work for request in requests for work in transport.start(request)]:
            work.wait()
        for tensor in ones:
            assert torch.equal(tensor, torch.full_like(tensor, world * (world - 1) // 2))
        for i, out in enumerate(outs):
            assert torch.equal(out, torch.full_like(out, sum(range(1 + i, world + 1 + i))))
        for all_rows in gathered:
            assert [set(row.tolist()) for row in all_rows] == [{float(r)} for r in range(world)]


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


def check_receives_come_first(transport: Transport) -> None:
    """Announcing posts all receives, at most 2 (p - 1) a tensor; after that all is sent."""
    given = tensors(torch.float32, 0)
    requests = [AllReduce(tensor) for tensor in given]
    with messages() as log:
        transport.prepare(requests)
    assert {name for name, _ in log} == {"irecv"}
    assert len(log) <= 2 * (dist.get_world_size() - 1) * len(given)
    assert sum(size for _, size in log) >= sum(t.nbytes for t in given)
    with messages() as log:
        exchange(transport, requests, announce=False)
    assert {name for name, _ in log} == {"isend"}


def received_ahead(transport: Transport, num_bytes: int) -> tuple[int, float]:
    """Bytes whose receives announcing ten tensors posts where so many pieces may come ahead, and
    the bytes of these tensors' sums that come from others."""
    given = [torch.ones(4096) for _ in range(10)]
    requests = [AllReduce(tensor) for tensor in given]
    with patch.object(ahead, "AHEAD", num_bytes):
        with messages() as log:
            transport.prepare(requests)
        exchange(transport, requests, announce=False)
    world = dist.get_world_size()
    results = sum(tensor.nbytes for tensor in given) * (world - 1) / world
    return sum(size for _, size in log), results


def check_bytes_sent(transport: Transport) -> None:
    """Each rank sends what a ring sends."""
    world = dist.get_world_size()
    requests = [
        AllReduce(torch.ones(2**16)),
        AllReduce(torch.ones(2**18)),
        ReduceScatter(torch.ones(world, 2**14), torch.ones(2**14)),
        AllGather(torch.ones(2**14), torch.ones(world, 2**14)),
    ]
    with messages() as log:
        for work in [work for request in requests for work in transport.start(request)]:
            work.wait()
    expected = sum(sent_bytes(request, world) for request in requests)
    sent = sum(size for name, size in log if name == "isend")
    assert sent == pytest.approx(expected, rel=2e-3)


def die(*_: object) -> None:
    """Without a goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(
    transport: Transport,
    place: AbstractContextManager[object] | None = None,
    first_may_end: bool = False,
    match: str | None = None,
    later: str = "an earlier exchange failed",
) -> None:
    """The last rank dies before it starts anything, or once it gets to a place; others see errors.

    Args:
        place: puts ``die`` there while it lasts.
        first_may_end: the first of three exchanges may be complete on some rank.
        match: of the errors of exchanges under way.
        later: of an exchange after that.
    """
    requests = [AllReduce(torch.ones(2**20)) for _ in range(3)]
    transport.prepare(requests)
    _meet("prepared", dist.get_world_size())
    if dist.get_rank() == dist.get_world_size() - 1:
        with place or nullcontext():
            if place is not None:
                transport.start(requests[0])[0].wait()
            die()
    works: list[Work] = []
    with suppress(RuntimeError):  # the news may come before all are on their way
        for request in requests:
            works += transport.start(request)
    assert works
    if first_may_end:
        with suppress(RuntimeError):
            works.pop(0).wait()
    for work in works:  # each of them ends
        with pytest.raises(RuntimeError, match=match):
            work.wait()
    with pytest.raises(RuntimeError, match=later):
        transport.start(AllReduce(torch.ones(1)))[0].wait()
    transport.close()
    # A rank that leaves closes its connections, which would end what others wait for.
    _meet("survivors", dist.get_world_size() - 1)


def _meet(name: str, ranks: int) -> None:
    """Return when so many ranks are here, without a connection to any of them."""
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    end = time.monotonic() + 90
    while store.add(name, 0) < ranks:
        assert time.monotonic() < end, f"{name}: not all ranks are here"
        time.sleep(0.01)
