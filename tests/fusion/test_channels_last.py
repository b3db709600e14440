"""Weights with channels innermost: the same training, and the usual order afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer

import slipstream
from slipstream.errors import ModelError
from slipstream.fusion import ChannelsLast

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 16, 3)).double()


def step(model: nn.Module, optimizer: Optimizer, session: Any = None) -> None:
    x = torch.linspace(-1, 1, 2 * 3 * 64, dtype=torch.float64).view(2, 3, 8, 8)
    loss = model(x).square().mean()
    if session is None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        session.backward(loss)
        session.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_goes_on_as_before(name: str) -> None:
    """Before, in and after a session, so that the optimizer has a state at each change."""
    model = build()
    other = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, other)]
    step(model, optimizers[0])
    strategy = {"compute": {"channels_last": True}}
    with slipstream.accelerate(model, optimizers[0], strategy=strategy) as session:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
        step(model, optimizers[0], session)
        assert "2 convolutions" in session.report()
    step(model, optimizers[0])
    for _ in range(3):
        step(other, optimizers[1])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, two)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for number, state in states[0].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.is_contiguous()
                torch.testing.assert_close(value, states[1][number][key])


def test_a_model_without_convolutions() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="Linear has no 2d convolution; leave out"):
        ChannelsLast(model, torch.optim.SGD(model.parameters()))


def test_weights_that_a_parametrization_computes_do_not_count() -> None:
    computed = weight_norm(nn.Conv2d(2, 2, 3))
    with pytest.raises(ModelError, match="has no 2d convolution with a weight of its own"):
        ChannelsLast(computed, torch.optim.SGD(computed.parameters()))
    both = nn.Sequential(computed, nn.Conv2d(2, 2, 3))
    changed = ChannelsLast(both, torch.optim.SGD(both.parameters()))
    assert changed.report_rows()[0].value == "1 convolutions"
    changed.close()
