"""Training with offload is bitwise the same, whatever blocks save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from slipstream.memory import offload, recompute
from slipstream.memory.offload.disk_store import DiskStore
from slipstream.memory.offload.host_store import HostStore
from slipstream.memory.offload.store import TensorStore
from slipstream.strategy import BudgetConfig, CheckpointsConfig, EveryConfig, OffloadConfig
from tests.memory.models import MODELS, REAL, built
from tests.memory.offload.squares import ALL


def trained(name: str, model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses, gradients and buffers of some steps."""
    case = MODELS[name]
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [b.clone() for b in model.buffers()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


STORES: dict[str, Callable[[], TensorStore]] = {
    "disk": DiskStore,
    # The code that GPUs run, with memory that is not pinned and streams that do nothing.
    "host": lambda: HostStore(torch.device("cpu"), 2**30),
}


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", REAL)
def test_training_is_bitwise_the_same(name, prefetch, store):
    plain = trained(name, built(name))
    model = built(name)
    config = OffloadConfig(to="disk", min_bytes=64, prefetch=prefetch)
    with offload(model, config, store=store()) as offloader:
        ours = trained(name, model)
    assert same(plain, ours)
    assert offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0
    assert len(offloader.blocks) == MODELS[name].count - 1


CONFIGS = [
    EveryConfig(),
    EveryConfig(every=2),
    BudgetConfig(budget=0.7),
    CheckpointsConfig(checkpoints=("*attention",)),
]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.kind}-{getattr(config, 'every', 0)}"
)
@pytest.mark.parametrize("name", REAL)
def test_training_is_bitwise_the_same_with_recomputation(name, config):
    if isinstance(config, CheckpointsConfig) and name == "resnet":
        config = CheckpointsConfig(checkpoints=("*.layers.?.layer",))
    if isinstance(config, CheckpointsConfig) and name == "gpt2":
        config = CheckpointsConfig(checkpoints=("*.attn",))
    plain = trained(name, built(name), steps=3)
    model = built(name)
    recomputed = recompute(model, config)
    with offload(model, OffloadConfig(to="disk", min_bytes=64)) as offloader:
        ours = trained(name, model, steps=3)
    recomputed.close()
    assert same(plain, ours)
    assert offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0


class OddLayout(nn.Module):
    """Saves a tensor as ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        match self.kind:
            case "transposed":
                return (x.exp().t() * x.t().exp()).t()
            case "expanded":
                return x * x[:1].exp().expand(6, 6).sin()
            case "every other":
                return x * x.exp()[:, ::2].sin().repeat(1, 2)
            case "overlapping":
                return x * x.exp().as_strided((6, 6), (1, 1)).sin()
            case "empty":
                return x + (x[:0].exp() * x[:0]).sum()
            case "complex":
                y = torch.complex(x.sin(), x.cos())
                return (y * y.conj()).real + y.imag.sin()
            case "double":
                return (x.double().exp() * x.double()).float()
            case "bfloat16":
                return (x.bfloat16().exp() * x.bfloat16()).float()
            case "bool":
                return torch.where(x > 0, x.exp(), x)
            case "parameter":
                return x @ self.weight @ self.weight.t()
            case "sparse":
                return torch.sparse.mm(torch.eye(6).to_sparse(), x).exp()
        raise KeyError(self.kind)


KINDS = """transposed, expanded, every other, overlapping, empty, complex, double, bfloat16, bool,
parameter, sparse""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_and_dtype(kind):
    model = nn.Sequential(*(OddLayout(kind) for _ in range(3)))
    x = torch.randn(6, 6, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
    with offload(model, ALL):
        ours = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
