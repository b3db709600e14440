"""Small models with half weights, and optimizers for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.optim import Lamb
from slipstream.precision import half_weights
from slipstream.strategy import HalfType


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def make(optimizer: str, parameters: Any) -> torch.optim.Optimizer:
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if optimizer == "lamb":
        return Lamb(parameters, lr=0.01)
    if optimizer == "fused":
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return torch.optim.AdamW(parameters, lr=0.01, foreach=optimizer == "foreach")


def small(dtype: HalfType = "bf16", **settings: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, optimizer, half_weights(net, optimizer, dtype, **settings)


def halves() -> tuple[nn.Sequential, torch.optim.SGD, torch.optim.SGD]:
    """Half weights with an optimizer of the body, and another one of the head."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    body, head = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    half_weights(model, body)
    return model, body, head


def batches() -> list[tuple[Tensor, Tensor]]:
    seed = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 5, generator=seed), torch.randn(6, 4, generator=seed)) for _ in range(8)
    ]


def update(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(batches()[0][0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
