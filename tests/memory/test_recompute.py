"""What is computed again comes out the same, costs exactly what it must, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.memory import recompute
from slipstream.strategy import Memory, Recompute
from tests.memory.models import MODELS, Case

WISHES: dict[str, dict[str, Any]] = {
    "every": {"every": 1},
    "two": {"every": 2},
    "three": {"every": 3},
    "most": {"budget": 0.8},
    "half": {"budget": 0.5},
    "little": {"budget": 0.4},
    "selective": {"every": 1, "keep": ["matmul", "convolution", "attention"]},
    "selective_two": {"every": 2, "keep": ["matmul"]},
}


def wish_of(settings: dict[str, Any]) -> Recompute:
    wish = Memory.model_validate({"recompute": settings}).recompute
    assert wish is not None
    return wish


def trained(case: Case, wish: Recompute | None, *, autocast: bool = False) -> dict[str, Any]:
    """Losses, gradients and state of a few steps."""
    torch.manual_seed(0)
    model = case.build().train()
    recomputed = recompute(model, wish) if wish is not None else None
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


@pytest.fixture(scope="module")
def plain() -> Any:
    known: dict[tuple[str, bool], dict[str, Any]] = {}

    def of(name: str, autocast: bool) -> dict[str, Any]:
        if (name, autocast) not in known:
            known[name, autocast] = trained(MODELS[name], None, autocast=autocast)
        return known[name, autocast]

    return of


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("wish", [*WISHES, "checkpoints"])
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_as_without(plain: Any, name: str, wish: str, autocast: bool) -> None:
    case = MODELS[name]
    settings = WISHES.get(wish, {"checkpoints": [case.blocks]})
    found = trained(case, wish_of(settings), autocast=autocast)
    assert_same(found, plain(name, autocast))
