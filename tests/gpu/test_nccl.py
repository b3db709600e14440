"""The engine, the channel, offloading and the recorder on CUDA streams, in an NCCL world of one.

NCCL takes one rank a GPU. The sum over one rank is the gradient itself, so what these tests hold is
the order of the streams: a delay on one of them must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import slipstream
from slipstream.codecs import Ranks as CodecRanks
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.engine import Engine
from slipstream.gradients.segments import parameters_of
from slipstream.memory.offload.offload import offload
from slipstream.strategy import FlatConfig, OffloadConfig, PerLayerConfig, Strategy, codec_of
from slipstream.trace.recorder import Recorder
from slipstream.transport.channel import Channel
from slipstream.transport.transport import make_transport
from tests.harness.ranks import Ranks

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # about 30 ms
STEPS = 3
CODECS: dict[str, Any] = {
    "no codec": None,
    "half": "half",
    "onebit": {"kind": "onebit", "start_step": 0},
    "powersgd": {"kind": "powersgd", "rank": 2, "start_step": 0},
}
SLOW = ("compute", "exchange")


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


class Words(nn.Module):
    """A sparse gradient (staged: sizes, then rows), dense ones, and buffers that are broadcast."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64, sparse=sparse)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
        self.body = nn.Sequential(*layers, nn.BatchNorm1d(64), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(x).mean(1)).square().mean()


def words(step: int, device: torch.device) -> torch.Tensor:
    return torch.randint(50, (32, 5), generator=torch.Generator().manual_seed(step)).to(device)


def make(device: torch.device, sparse: bool = True) -> Words:
    torch.manual_seed(0)
    return Words(sparse).to(device)


class Late:
    """A transport whose requests start late on the stream that starts them."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def prepare(self, requests: Sequence[Any]) -> None:
        self._transport.prepare(requests)

    def start(self, request: Any) -> Sequence[dist.Work]:
        torch.cuda._sleep(CYCLES)
        return self._transport.start(request)

    def close(self) -> None:
        self._transport.close()


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """The backends that a session asks for; the harness destroys the group."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def engine_on(
    model: nn.Module, device: torch.device, codec: Any, recorder: Recorder, late: bool
) -> Iterator[Engine]:
    """An engine as a session composes it for several ranks; alone, a session needs none."""
    config = Strategy.load({"gradients": {"codec": codec}}).gradients.codec
    single, staged = (make_transport(FlatConfig(), dist.new_group()) for _ in range(2))
    if late:
        single, staged = Late(single), Late(staged)
    with ExitStack() as stack:
        channel = stack.enter_context(closing(Channel(single, [staged], device, recorder)))
        engine = Engine(
            model,
            parameters_of(model, trainable=True),
            split=PerLayerConfig(),
            overlap=True,
            compression_plan=CompressionPlan(partial(codec_of, config), CodecRanks(0, 1), {}),
            channel=channel,
            control=dist.new_group(backend="gloo"),
            looks=True,
        )
        yield stack.enter_context(closing(engine))


def trained(name: str, slow: str | None, offloaded: bool, device_type: str = "cuda") -> list[Any]:
    """Losses and parameters after some steps, and the bytes that went out to the host."""
    device = torch.device(device_type)
    with world_of_one(device), ExitStack() as stack:
        model, recorder = make(device), Recorder(0, 0, STEPS)
        # Before the engine's: a hook of the offloader must see activations as autograd saves them.
        offloader = offload(model, OffloadConfig(min_bytes=0)) if offloaded else None
        late = slow == "exchange"
        engine = stack.enter_context(engine_on(model, device, CODECS[name], recorder, late))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            recorder.begin_step(step, recorder.stamp(device))
            loss = model(words(step, device))
            if slow == "compute":
                torch.cuda._sleep(CYCLES)
            engine.begin(exchange=True, scale=1.0)
            loss.backward()
            engine.end()
            optimizer.step()  # at once, on the current stream: it must wait for what engine read
            optimizer.zero_grad()
            engine.updated(step + 1)
            recorder.end_step(recorder.stamp(device))
            losses.append(loss.detach())
        trace = recorder.gather()
        assert trace is not None
        spans = [event for event in trace.events if event.name.startswith("allreduce")]
        assert len(spans) == STEPS * len(engine.segments)
        assert all(0 <= span.duration < 60 for span in spans)
        moved = offloader.traffic.bytes_out if offloader is not None else 0
        if offloader is not None:
            offloader.close()
        return [*(t.detach().cpu() for t in (*losses, *model.parameters())), moved]


def plain(sparse: bool = True, device_type: str = "cuda") -> list[torch.Tensor]:
    """Losses and parameters of a loop without any of this."""
    device = torch.device(device_type)
    model = make(device, sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        losses.append(model(words(step, device)))
        losses[-1].backward()
        if sparse:  # the engine sums equal rows before the update, too
            rows = model.embedding.weight
            rows.grad = rows.grad.coalesce()
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


@pytest.mark.parametrize("slow", [None, *SLOW])
def test_the_sum_over_one_rank_is_the_gradient(one: Ranks, slow: str | None) -> None:
    [expected] = one.run(plain, connect=False)
    [[*values, _]] = one.run(trained, "no codec", slow, False, connect=False)
    assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("name", [name for name in CODECS if name != "no codec"])
def test_codecs_compute_the_same_whichever_stream_is_late(one: Ranks, name: str, slow: str) -> None:
    [[*expected, _]] = one.run(trained, name, None, False, connect=False)
    [[*values, _]] = one.run(trained, name, slow, False, connect=False)
    assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("slow", [None, *SLOW])
def test_offloading_goes_beside_the_exchange(one: Ranks, slow: str | None) -> None:
    [expected] = one.run(plain, connect=False)
    [[*values, moved]] = one.run(trained, "no codec", slow, True, connect=False)
    assert all(map(torch.equal, values, expected))
    assert moved > 0


def with_session(folder: str) -> list[torch.Tensor]:
    """The same loop by a session, which joins an NCCL world of its own, records and offloads."""
    device = torch.device("cuda")
    model = make(device, sparse=False)  # equal rows of a sparse gradient are added in any order
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = {
        "memory": {"offload": {"min_bytes": 0}},
        "trace": {"steps": 2, "folder": folder},
    }
    losses = []
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        assert "nccl" in str(dist.get_backend_config())
        for step in range(STEPS):
            loss = session.model(words(step, device))
            session.backward(loss)
            assert session.step()
            losses.append(loss)
    assert not dist.is_initialized()
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


def test_a_session_in_a_world_of_one(one: Ranks, tmp_path: Any) -> None:
    [expected] = one.run(plain, False, connect=False)
    [values] = one.run(with_session, str(tmp_path), connect=False)
    assert all(map(torch.equal, values, expected))
    assert "forward" in (tmp_path / "trace.json").read_text()
