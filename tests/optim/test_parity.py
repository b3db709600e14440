"""Parity with code of others: torch-optimizer 0.3.0 from PyPI, which ours can be set to follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_optimizer
from torch import nn

from slipstream.optim import Lamb, Lars
from tests.optim.variants import give_gradients, parameters, values

LARS: list[dict[str, Any]] = [
    {"lr": 1.0},
    {"lr": 1.0, "weight_decay": 1e-2},
    {"lr": 5.0, "weight_decay": 1e-2, "momentum": 0.9},
    {"lr": 5.0, "weight_decay": 1e-3, "momentum": 0.9, "nesterov": True},
    {"lr": 0.3, "weight_decay": 1e-1, "momentum": 0.5, "trust_coefficient": 0.02, "eps": 1e-3},
]
LAMB: list[dict[str, Any]] = [
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 1e-2},
    {"lr": 1e-1, "weight_decay": 1e-1, "betas": (0.5, 0.9), "eps": 1e-3},
    {"lr": 1e-2, "clamp_value": 2.0},
    {"lr": 1e-2, "clamp_value": 0.1, "weight_decay": 1e-2},
]
VECTORS_TOO = {"adapt_vectors": True, "decay_vectors": True}


def trained(make: Any, steps: int = 20, **settings: Any) -> list[torch.Tensor]:
    """Where a small network goes that learns random targets, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    optimizer = make(model.parameters(), **settings)
    images = torch.randn(steps, 8, 2, 5, 5, dtype=torch.float64)
    for batch in images:
        optimizer.zero_grad()
        (model(batch) - batch.mean()).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def moved(make: Any, **settings: Any) -> list[torch.Tensor]:
    """Where parameters of many shapes go under given gradients."""
    named = parameters(dtype=torch.float64)
    optimizer = make([p for _, p in named], **settings)
    for number in range(10):
        give_gradients(named, number)
        optimizer.step()
    return values(named)


def check(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("run", [trained, moved])
@pytest.mark.parametrize("settings", LARS, ids=str)
def test_lars(settings: dict[str, Any], run: Any) -> None:
    settings = {"trust_coefficient": 0.001, "momentum": 0.0, **settings}
    theirs = run(torch_optimizer.LARS, **settings)
    check(run(Lars, adapt_undecayed=False, **VECTORS_TOO, **settings), theirs)


@pytest.mark.parametrize("run", [trained, moved])
@pytest.mark.parametrize("settings", LAMB, ids=str)
def test_lamb(settings: dict[str, Any], run: Any) -> None:
    settings = {"weight_decay": 0.0, **settings}
    theirs = run(torch_optimizer.Lamb, **settings)
    bounds = (0.0, settings.pop("clamp_value", 10.0))
    ours = run(Lamb, clip_weight_norm=bounds, bias_correction=False, **VECTORS_TOO, **settings)
    check(ours, theirs)
