"""The engine of a single replica: gradients are the averages, but for the loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.single import SingleReplicaEngine
from slipstream.strategy import SingleConfig

SCALE = 8.0


def engine_of(model: nn.Module) -> GradientEngine:
    return SingleReplicaEngine(dict(model.named_parameters()), SingleConfig())


def backward(
    engine: GradientEngine, model: nn.Module, *, exchange: bool = True, loss_scale: float = SCALE
) -> None:
    engine.begin(exchange=exchange, scale=1 / loss_scale, loss_scale=loss_scale)
    (model(torch.ones(1, 2)).sum() * loss_scale).backward()
    engine.end()


def gradient(model: nn.Linear) -> list[float]:
    assert model.weight.grad is not None
    return model.weight.grad.flatten().tolist()


@pytest.mark.parametrize("loss_scale", [1.0, SCALE])
def test_gradients_come_out_without_the_loss_scale(loss_scale: float) -> None:
    model = nn.Linear(2, 1)
    backward(engine_of(model), model, loss_scale=loss_scale)
    assert gradient(model) == [1.0, 1.0]


def test_inside_a_window_the_loss_scale_stays() -> None:
    model = nn.Linear(2, 1)
    engine = engine_of(model)
    backward(engine, model, exchange=False)
    assert gradient(model) == [SCALE, SCALE]
    backward(engine, model)
    assert gradient(model) == [2.0, 2.0]


@pytest.mark.parametrize("between", [[], [False], [False, False], [True, False, True]])
def test_backward_passes_add_up_also_after_averages(between: list[bool]) -> None:
    model = nn.Linear(2, 1)
    engine = engine_of(model)
    passes = [True, *between, True]
    for exchange in passes:
        backward(engine, model, exchange=exchange)
    assert gradient(model) == [float(len(passes))] * 2


def test_an_update_ends_it() -> None:
    model = nn.Linear(2, 1)
    engine = engine_of(model)
    for step in range(2):
        backward(engine, model)
        assert gradient(model) == [1.0, 1.0]
        model.zero_grad()
        engine.updated(step + 1)


def test_a_parameter_without_a_gradient_has_none_afterwards() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    backward(engine_of(model), model)
    assert model.bias.grad is None


def test_there_is_no_layout_and_no_state() -> None:
    engine = engine_of(nn.Linear(2, 1))
    assert (engine.order, engine.segments, engine.gradients, engine.ready) == (None, (), (), None)
    assert (engine.overflowed, engine.in_flight, engine.codec_state()) == (False, False, {})
    assert [row.setting for row in engine.report_rows()] == ["exchange"]
    engine.close()


def test_a_dummy_batch_uses_no_parameter_by_gradients_of_zero() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    engine = engine_of(model)

    def used(exchange: bool, dummy: bool) -> list[str]:
        engine.begin(exchange=exchange, scale=1.0, dummy=dummy)
        (model[0](torch.ones(1, 2)) * torch.tensor([[0.0]]) + model[1].bias).sum().backward()
        engine.end()
        return [name for name, p in model.named_parameters() if p.grad is not None]

    assert used(exchange=True, dummy=True) == ["1.bias"]
    model.zero_grad()
    assert used(exchange=False, dummy=True) == ["0.weight", "0.bias", "1.bias"], (
        "until the exchange"
    )
    engine.begin(exchange=True, scale=1.0)
    engine.end()
    assert model[0].bias.grad is None
    assert used(exchange=True, dummy=False) == ["0.weight", "0.bias", "1.bias"], (
        "of one that counts"
    )
