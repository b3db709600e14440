"""A fused optimizer in a session: beside what exchanges parameters while the optimizer steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import slipstream
from slipstream.errors import ModelError, StrategyError
from slipstream.optim import Lamb

OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01), "6 RMSprop updates -> 2"),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01), "6 AdamW updates -> 1"),
    "lamb": (lambda p: Lamb(p, lr=0.01), "6 Lamb updates -> 1"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half weights": {"precision": {"kind": "half_weights", "dtype": "bf16"}},
    "accumulation": {"gradients": {"accumulate": 2}},
}


def trained(optimizer: str, strategy: dict[str, Any]) -> tuple[nn.Module, Optimizer, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    update = OPTIMIZERS[optimizer][0](model.parameters())
    random = torch.Generator().manual_seed(1)
    with slipstream.accelerate(model, update, None, strategy) as session:
        for _ in range(6):
            session.backward(session.model(torch.randn(5, 4, generator=random)).square().mean())
            session.step()
        report = session.report()
    return model, update, re.findall(r"\d+ \w+ updates -> \d+", report)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_the_optimizer_alone(optimizer: str, settings: str) -> None:
    strategy = SETTINGS[settings]
    plain, theirs, none = trained(optimizer, strategy)
    fused, ours, rows = trained(optimizer, {**strategy, "compute": {"fuse_optimizer": True}})
    assert (none, rows) == ([], [OPTIMIZERS[optimizer][1]])
    tolerance = 1e-2 if settings == "half weights" else 1e-5  # a rounding may turn one of 8 bits
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]


def test_a_class_of_the_user_s_own_must_be_vouched_for() -> None:
    class Mine(torch.optim.RMSprop):
        pass

    model = nn.Linear(2, 2)
    optimizer = Mine(model.parameters())
    with pytest.raises(ModelError, match="Mine cannot be fused"):
        slipstream.accelerate(model, optimizer, strategy={"compute": {"fuse_optimizer": True}})
    strategy = {"compute": {"fuse_optimizer": "elementwise"}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        session.backward(session.model(torch.ones(1, 2)).sum())
        assert session.step()


def test_a_word_that_is_not_allowed() -> None:
    with pytest.raises(
        StrategyError, match="fuse_optimizer: got 'yes'; allowed: false or true or elementwise"
    ):
        slipstream.Strategy.load({"compute": {"fuse_optimizer": "yes"}})
