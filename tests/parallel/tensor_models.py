"""Whole and split models for the tests of tensor parallelism."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream import comm
from slipstream.parallel.tensor.split import SplitLayers, split_layers
from tests.parallel.models import Case


def built(case: Case) -> nn.Module:
    """A different model on each rank; splitting takes the first rank's."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return case.build().double()


def pair(case: Case, plan: str) -> tuple[nn.Module, nn.Module, Any, Any, SplitLayers]:
    """The whole model and the split one, each with its optimizer."""
    model = built(case)
    dist.broadcast(torch.zeros(1), 0)
    whole = built(case)
    for mine, first in zip(whole.state_dict().values(), model.state_dict().values(), strict=True):
        dist.broadcast(mine, 0)
        if dist.get_rank() == 0:
            assert torch.equal(mine, first)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, model)]
    split = split_layers(model, world(), case.plans[plan](model), optimizers[1])
    return whole, model, *optimizers, split


def world() -> comm.Group:
    return comm.group(check=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9, msg=name)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, padding_idx=2)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words))
