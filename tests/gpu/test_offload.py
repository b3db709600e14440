"""Pinned memory and side streams: no memory is overwritten before it is read, whatever is slow."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from slipstream.memory import offload
from slipstream.memory.offload.host_store import HostStore
from slipstream.strategy import OffloadConfig
from tests.memory.models import MODELS

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # some 30 ms
BYTES = 2**24
SLOW = ["nothing", "compute", "out", "back"]


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Delayed(HostStore):
    """Delays the copies of one direction, or the computation."""

    def __init__(self, slow: str) -> None:
        super().__init__(cuda(), budget_bytes=2**33)
        self.slow = slow

    def put(self, raw, what):
        with self._late("out", self._out):
            return super().put(raw, what)

    def fetch(self, ticket):
        with self._late("back", self._back):
            super().fetch(ticket)

    @contextmanager
    def _late(self, name, stream):
        if self.slow == name:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
        if self.slow == "compute":
            torch.cuda._sleep(CYCLES)
        yield


def filled(value: int) -> torch.Tensor:
    return torch.full((BYTES,), value, dtype=torch.uint8, device=cuda())


@pytest.mark.parametrize("slow", SLOW)
def test_memory_of_offloaded_tensors_is_not_overwritten_too_early(slow):
    store = Delayed(slow)
    tickets = []
    for value in range(8):
        raw = filled(value)
        tickets.append(store.put(raw, "x"))
        store.settle(tickets[-1])
        del raw  # the allocator hands the same memory to what follows
        filled(99)
    for value, ticket in reversed(list(enumerate(tickets))):
        store.fetch(ticket)
        assert bool((store.take(ticket) == value).all())
        store.drop(ticket)
    store.close()


@pytest.mark.parametrize("slow", SLOW)
def test_memory_that_a_fetch_fills_is_not_still_in_use(slow):
    store = Delayed(slow)
    ticket = store.put(filled(1), "x")
    store.settle(ticket)
    for _ in range(8):
        busy = filled(7)
        if slow == "compute":
            torch.cuda._sleep(CYCLES)
        read = busy.clone()
        del busy  # its memory is what the next fetch may fill
        store.fetch(ticket)
        assert bool((store.take(ticket) == 1).all())
        assert bool((read == 7).all())
    store.close()


@pytest.mark.parametrize("slow", SLOW)
def test_fetched_and_dropped_unread(slow):
    store = Delayed(slow)
    for _ in range(4):
        ticket = store.put(filled(1), "x")
        store.settle(ticket)
        store.fetch(ticket)
        store.drop(ticket)
        del ticket
        other = store.put(filled(2), "y")  # reclaims
        later = filled(3)
        assert bool((later == 3).all())
        assert bool((store.take(other) == 2).all())
        store.drop(other)
    store.close()


def test_the_host_does_not_wait():
    store = Delayed("out")
    store.drop(store.put(filled(0), "x"))  # to pin memory takes long
    torch.cuda.synchronize()
    ticket = store.put(filled(1), "x")
    assert not ticket.copied.query()
    store.settle(ticket)
    store.fetch(ticket)
    taken = store.take(ticket)
    assert not ticket.arrived.query()
    assert bool((taken == 1).all())
    assert store.traffic.seconds_waited > 0
    store.close()


def test_copies_run_beside_the_computation():
    store = Delayed("nothing")
    done = torch.cuda.Event()
    raw = filled(1)
    torch.cuda.synchronize()
    ticket = store.put(raw, "x")
    torch.cuda._sleep(20 * CYCLES)
    done.record()
    ticket.copied.synchronize()
    assert not done.query()
    torch.cuda.synchronize()
    store.close()


def test_pinned_memory_is_reused():
    store = Delayed("nothing")
    for _ in range(3):
        tickets = [store.put(filled(n), "x") for n in range(4)]
        reserved = store.reserved_bytes
        for ticket in tickets:
            store.drop(ticket)
    assert store.reserved_bytes == reserved == 2**28
    store.close()


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.filterwarnings("ignore")  # of what torch cannot make deterministic
@pytest.mark.parametrize("name", ["bert", "gpt2", "swin"])  # max-pooling adds in any order
def test_training_is_bitwise_the_same(name, slow):
    def trained(config: OffloadConfig | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = MODELS[name].build().cuda().train()
        inputs = {k: v.cuda() for k, v in MODELS[name].batch(0).items()}
        offloader = offload(model, config, store=Delayed(slow)) if config else None
        seen = []
        torch.manual_seed(7)
        for _ in range(3):
            loss = model(**inputs).loss
            loss.backward()
            seen += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        if offloader is not None:
            assert offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0
            offloader.close()
        return seen

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, ours = trained(None), trained(OffloadConfig(min_bytes=0, prefetch=2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, plain, ours))


def test_less_memory_is_allocated():
    def peak(config: OffloadConfig | None) -> int:
        blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16)]
        model = nn.Sequential(*blocks).cuda()
        x = torch.randn(2**14, 512, device=cuda())
        offloader = offload(model, config) if config else None
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x).sum().backward()
            model.zero_grad()
        found = torch.cuda.max_memory_allocated() - before
        if offloader is not None:
            offloader.close()
        return found

    assert peak(OffloadConfig()) < peak(None) / 2
