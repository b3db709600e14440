"""Cuts by measured cost: the exact programme, the candidates, and what is no candidate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import StrategyError
from slipstream.parallel.pipeline.balance import (
    balance,
    balance_parameters,
    balanced,
    candidates,
)
from tests.parallel.staged import CASES


@pytest.mark.parametrize(
    ("costs", "parts", "starts"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([5, 1, 1, 1], 2, [1]),
        ([1, 1, 1, 3], 2, [3]),
        ([2, 3, 4, 5, 6], 3, [2, 4]),
        ([1.0], 1, []),
        ([1, 2, 3], 3, [1, 2]),
    ],
)
def test_balanced_parts(costs: list[float], parts: int, starts: list[int]) -> None:
    def slowest(begins: list[int]) -> float:
        ends = [*begins, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip([0, *begins], ends, strict=True))

    assert slowest(balanced(costs, parts)) == slowest(starts)
    assert len(balanced(costs, parts)) == parts - 1


@pytest.mark.parametrize("parts", [0, 3])
def test_balanced_refuses(parts: int) -> None:
    with pytest.raises(StrategyError, match=f"2 pieces in {parts} parts; allowed: 1 to 2"):
        balanced([1.0, 1.0], parts)


def test_candidates_are_blocks() -> None:
    assert candidates(CASES["gpt2"].build()) == [f"transformer.h.{n}" for n in range(4)]
    layers = [f"layer{k}.{n}" for k in range(1, 5) for n in range(2)]
    assert candidates(CASES["resnet"].build()) == layers


def test_balanced_by_parameters() -> None:
    model = CASES["gpt2"].build()
    model.transformer.h[3] = nn.Identity()
    model.transformer.wte = nn.Embedding(10**6, 1)  # looking up takes no time
    assert balance_parameters(model, 3) == ["transformer.h.1", "transformer.h.2"]
    assert balance_parameters(model, 1) == []
    assert balance_parameters(CASES["resnet"].build(), 2) == ["layer3.1"]
    with pytest.raises(StrategyError, match="9 stages; allowed: 1 to 4, as GPT2LMHeadModel has 3"):
        balance_parameters(model, 9)


class Slow(nn.Module):
    """A layer that takes a while."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = torch.tanh(x @ x)
        return x


def test_balance_measures() -> None:
    model = nn.Sequential(Slow(20), Slow(1), nn.BatchNorm1d(64), Slow(1), Slow(1))
    cut = balance(model, (torch.ones(64, 64),), stages=2, runs=7)
    assert cut == ["1"]
    assert int(model[2].num_batches_tracked) == 0
    assert balance(model, (torch.ones(64, 64),), stages=1) == []
    with pytest.raises(StrategyError, match="9 stages; allowed: 1 to 6, as Sequential has 5 modul"):
        balance(model, (torch.ones(64, 64),), stages=9)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Skips(nn.Module):
    """The second layer is inside of a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x + self.layers[2](self.layers[1](x))
        return self.layers[3](x)


def test_balance_cuts_only_where_one_tensor_flows() -> None:
    cuts = balance(Skips(), (torch.ones(2, 4),), stages=3, runs=1)
    assert set(cuts) <= {"layers.0", "layers.1", "layers.3"}
