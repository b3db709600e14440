"""Train a model with and without recomputation, and compare everything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slipstream.memory import Recomputed, recompute
from slipstream.strategy import MemoryConfig, RecomputeConfig
from tests.memory.models import MODELS, Case, built

CONFIGS: dict[str, dict[str, Any]] = {
    "every": {"every": 1},
    "two": {"every": 2},
    "three": {"every": 3},
    "most": {"budget": 0.8},
    "half": {"budget": 0.5},
    "little": {"budget": 0.4},
    "selective": {"every": 1, "keep": ["matmul", "convolution", "attention"]},
    "selective_two": {"every": 2, "keep": ["matmul"]},
}


def config_of(settings: dict[str, Any]) -> RecomputeConfig:
    config = MemoryConfig.model_validate({"recompute": settings}).recompute
    assert config is not None
    return config


def trained(
    case: Case, config: RecomputeConfig | None, *, autocast: bool = False
) -> dict[str, Any]:
    """Losses, gradients and state of a few steps."""
    torch.manual_seed(0)
    model = case.build().train()
    recomputed = recompute(model, config) if config is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(model, case.batch(step))
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for name, p in model.named_parameters():
            if p.grad is not None:
                seen[f"{step} {name}"] = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    seen |= model.state_dict() | {"random": torch.get_rng_state()}
    if recomputed is not None:
        recomputed.close()
        assert not any("forward" in vars(module) for module in model.modules())
    return seen


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


def after_one_forward(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Recomputed]:
    model = built(name)
    recomputed = recompute(model, config_of(settings))
    MODELS[name].loss(model, MODELS[name].batch(0)).backward()
    return model, recomputed
