"""Every exchange goes through the transport that the strategy names: one of the test's own.

It is a class and a row in the table. It never calls the backend's all-reduce: it gathers the
tensors of all ranks and sums them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slipstream
from slipstream.ddp import DdpCodec, codec_hook
from slipstream.strategy import FlatConfig
from slipstream.transport.flat import FlatTransport
from slipstream.transport.requests import AllGather, AllReduce, Request
from slipstream.transport.transport import TRANSPORTS
from tests.harness import reference
from tests.harness.counters import collectives, count
from tests.harness.models import MODELS
from tests.harness.ranks import Ranks

STEPS = 3


class GatherAndSum(FlatConfig):
    """The setting that selects the transport; slipstream's own are variants of the union."""


class GatherAndSumTransport:
    """Sums in rank order, and counts requests and the bytes of their tensors."""

    requests: ClassVar[Counter[str]] = Counter()
    num_bytes: ClassVar[Counter[str]] = Counter()
    closed: ClassVar[list[bool]] = []

    def __init__(self, config: GatherAndSum, group: dist.ProcessGroup) -> None:
        self._flat, self._ranks = FlatTransport(config, group), dist.get_world_size(group)
        self._announced: list[AllReduce] = []

    def prepare(self, requests: Sequence[AllReduce]) -> None:
        assert not self._announced  # all of the last backward were started
        self._announced = list(requests)

    def start(self, request: Request) -> Sequence[dist.Work]:
        kind = type(request).__name__
        self.requests[kind] += 1
        if not isinstance(request, AllReduce):
            self.num_bytes[kind] += request.send.nbytes if kind != "Broadcast" else 0
            return self._flat.start(request)
        tensor = request.tensor
        self.num_bytes[kind] += tensor.nbytes
        if self._announced:  # a stage's transport hears of none
            assert self._announced.pop(0).tensor is tensor
        rows = tensor.new_empty(self._ranks, tensor.numel())
        for work in self._flat.start(AllGather(tensor, rows)):
            work.wait()
        tensor.copy_(rows[0])
        for row in rows[1:]:
            tensor += row.view_as(tensor)
        return []

    def close(self) -> None:
        self.closed.append(not self._announced)


@contextmanager
def registered() -> Iterator[type[GatherAndSumTransport]]:
    transport = GatherAndSumTransport
    for counter in (transport.requests, transport.num_bytes, transport.closed):
        counter.clear()
    with patch.dict(TRANSPORTS, {GatherAndSum: transport}):
        yield transport
    assert transport.closed
    assert all(transport.closed)


def trained(name: str, settings: dict[str, Any]) -> tuple[bool, dict[str, int], dict[str, int]]:
    """Whether the transport trains a model to the bits of the flat one; requests and bytes."""
    case = MODELS[name]
    flat = reference.accelerated(case, "sgd", STEPS, 1, settings)
    with registered() as ours_used, collectives() as log:
        settings = {**settings, "transport": GatherAndSum()}
        ours = reference.accelerated(case, "sgd", STEPS, 1, settings)
    # on memory in common at accelerate(), on which gradients come before the first exchange, and
    # on parameters behind the second
    assert count(log, "all_reduce") == 3
    return reference.same_bits(flat, ours), dict(ours_used.requests), dict(ours_used.num_bytes)


def test_dense_gradients_and_buffers(two: Ranks) -> None:
    model = reference.build(MODELS["conv_bn"])
    parameters = list(model.parameters())
    for same, requests, num_bytes in two.run(trained, "conv_bn", {"split": "per_gradient"}):
        assert same
        assert requests == {"AllReduce": STEPS * len(parameters), "Broadcast": STEPS}
        flags = 4 * len(parameters)
        assert num_bytes["AllReduce"] == STEPS * (sum(p.nbytes for p in parameters) + flags)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_segment_is_announced_and_counted(two: Ranks, overlap: bool) -> None:
    num_bytes = sum(p.nbytes + 4 for p in reference.build(MODELS["mlp"]).parameters())
    settings = {"split": "single", "overlap": overlap}
    for same, requests, sent in two.run(trained, "mlp", settings):
        assert same
        assert requests == {"AllReduce": STEPS}
        assert sent == {"AllReduce": STEPS * num_bytes}


CODECS: dict[str, tuple[object, dict[str, int]]] = {
    "half": ("half", {"AllReduce": 3}),
    "int8": ({"kind": "int8", "block": 8}, {"AllToAll": 3, "AllGather": 3}),
    "powersgd": (  # one request as long as it is dense, then P and Q
        {"kind": "powersgd", "rank": 1, "start_step": 1, "min_compression_rate": 1},
        {"AllReduce": 1 + 2 + 2},
    ),
    "dgc": (
        {"kind": "dgc", "density": 0.3, "warmup_steps": 0},
        {"AllReduce": 3, "AllGather": 3},
    ),
}
"""With what each asks for in three steps of one segment."""


@pytest.mark.parametrize("codec", CODECS)
def test_codecs(two: Ranks, codec: str) -> None:
    config, expected = CODECS[codec]
    dense = STEPS * sum(p.nbytes + 4 for p in reference.build(MODELS["mlp"]).parameters())
    for same, requests, num_bytes in two.run(trained, "mlp", {"codec": config, "split": "single"}):
        assert same
        assert requests == expected
        if codec == "half":
            assert num_bytes["AllReduce"] == dense // 2


def test_sparse_gradients(two: Ranks) -> None:
    for same, requests, num_bytes in two.run(trained, "sparse", {}):
        assert same
        assert requests["AllReduce"] >= STEPS
        assert requests["AllGather"] >= 3 * STEPS  # counts, indices, values
        assert num_bytes["AllGather"] > 0


def hooked(codec: object) -> tuple[bool, set[str]]:
    """The same for DDP's hook."""
    models = []
    for transport in (FlatConfig(), GatherAndSum()):
        with registered() as log:
            torch.manual_seed(0)
            ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
            hook = DdpCodec(ddp, codec, transport=transport)
            ddp.register_comm_hook(hook, codec_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(STEPS):
                seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
                ddp(torch.randn(8, 64, generator=seed)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            hook.close()
            log.closed.append(True)  # none is open in the flat turn
            kinds = set(log.requests)
        assert bool(kinds) == (type(transport) is GatherAndSum)
        models.append(ddp)
    return reference.same_bits(*models), kinds


@pytest.mark.parametrize("codec", ["half", "int8", "powersgd"])
def test_the_hook_of_ddp(two: Ranks, codec: str) -> None:
    config, expected = CODECS[codec]
    assert two.run(hooked, config) == [(True, set(expected))] * 2


def shared() -> tuple[float, dict[str, int]]:
    """Two ranks share each of two models: only ranks of the same part average gradients."""
    losses = []
    for transport in (FlatConfig(), GatherAndSum()):
        with registered() as log:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            strategy = {
                "parallel": {"tensor": {"ranks": 2, "plan": {"0": "column", "2": "row"}}},
                "gradients": {"transport": transport, "split": "single"},
            }
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with slipstream.accelerate(model, optimizer, None, strategy) as session:
                for step in range(STEPS):
                    seed = torch.Generator().manual_seed(10 * step + dist.get_rank() // 2)
                    loss = session.model(torch.randn(4, 16, generator=seed)).square().mean()
                    session.backward(loss)
                    session.step()
            log.closed.append(True)
            requests = dict(log.requests)
        losses.append(float(loss.detach()))
    return abs(losses[0] - losses[1]), requests


def test_the_data_groups_of_a_mesh() -> None:
    with Ranks(4) as four:
        for difference, requests in four.run(shared):
            assert difference == 0
            assert requests["AllReduce"] % STEPS == 0
            assert requests["AllReduce"] > 0
