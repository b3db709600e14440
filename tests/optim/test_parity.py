"""Parity with code of others: pytorch-optimizer from PyPI, whose variants ours can be set to.

Its LARS is ours with ``eps=0``; its LAMB has no bias correction, the paper's phi as
``min(|w|, 10)``, eps in the ratio, too (hence a tiny one here), and the norm of all gradients in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn

from slipstream.optim import Lamb, Lars
from tests.optim.variants import give_gradients, parameters, values

LARS: list[dict[str, Any]] = [
    {"lr": 1.0, "momentum": 0.0},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-2, "trust_coefficient": 0.05},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.02},
]
LAMB: list[dict[str, Any]] = [
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 1e-2},
    {"lr": 1e-1, "weight_decay": 1e-1, "betas": (0.5, 0.9)},
    {"lr": 1e-2, "grad_averaging": False},
    {"lr": 1e-2, "weight_decay": 1e-2, "max_grad_norm": 0.01},
]

Run = Callable[..., list[torch.Tensor]]


def trained(make: Any, **settings: Any) -> list[torch.Tensor]:
    """Where 20 steps take a small network that learns random targets."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    optimizer = make(model.parameters(), **settings)
    for images in torch.randn(20, 8, 2, 5, 5, dtype=torch.float64):
        optimizer.zero_grad()
        (model(images) - images.mean()).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def moved(make: Any, **settings: Any) -> list[torch.Tensor]:
    """Where 10 steps of given gradients take parameters of many shapes."""
    named = parameters(dtype=torch.float64)
    optimizer = make([parameter for _, parameter in named], **settings)
    for number in range(10):
        give_gradients(named, number)
        optimizer.step()
    return values(named)


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor], within: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, rtol=within, atol=within)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("run", [trained, moved])
@pytest.mark.parametrize("settings", LARS, ids=str)
def test_lars(settings: dict[str, Any], run: Run, foreach: bool) -> None:
    theirs = run(pytorch_optimizer.LARS, foreach=foreach, **settings)
    check(run(Lars, eps=0.0, **settings), theirs)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("run", [trained, moved])
@pytest.mark.parametrize("settings", LAMB, ids=str)
def test_lamb(settings: dict[str, Any], run: Run, foreach: bool) -> None:
    settings = {"weight_decay": 0.0, "eps": 1e-13, **settings}
    theirs = run(
        pytorch_optimizer.Lamb, pre_norm="max_grad_norm" in settings, weight_decouple=False,
        adam_debias=True, foreach=foreach, **settings,
    )  # fmt: skip
    ours = run(
        Lamb, bias_correction=False, clip_weight_norm=(0.0, 10.0), adapt_vectors=True,
        decay_vectors=True, **settings,
    )  # fmt: skip
    check(ours, theirs, within=1e-6 if "max_grad_norm" in settings else 1e-9)
