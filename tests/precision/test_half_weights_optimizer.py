"""Half weights and optimizers: who steps the masters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.precision import half_weights
from tests.harness.versions import needs_torch_2_12
from tests.precision.battery import digest
from tests.precision.half_models import Net, batches, halves, small, update


def test_an_optimizers_state_is_loaded_in_full_width() -> None:
    net, optimizer, _ = small()
    update(net, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    update(net, optimizer)
    optimizer.load_state_dict(copy.deepcopy(kept))
    assert digest(optimizer.state_dict()) == digest(kept)
    assert net.first.weight.dtype == torch.bfloat16


def test_torchs_grad_scaler_serves_it() -> None:
    net, optimizer, half = small("fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = half.masters[net.first.weight].clone()
    for _ in range(30):
        scaler.scale(net(batches()[0][0]).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert 1 < scaler.get_scale() < 2.0**30  # it fell until nothing overflowed
    assert not torch.equal(half.masters[net.first.weight], before)


def test_a_parameter_may_join_the_optimizer_later() -> None:
    model, body, _ = halves()
    before = digest(model[2].state_dict())
    for joined in (False, True):
        model(torch.ones(2, 4)).sum().backward()
        body.step()
        assert (digest(model[2].state_dict()) != before) == joined
        body.zero_grad()
        if not joined:
            body.add_param_group({"params": model[2].parameters()})


class Ahead(torch.optim.Optimizer):
    """Two steps of another optimizer in one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        self.inner.step()


def test_a_parameter_that_the_optimizer_does_not_hold_is_the_users() -> None:
    """A teacher inside of the model that follows by ``data``."""
    model, body, _ = halves()
    model[2].weight.data.fill_(2.0)
    model(torch.ones(2, 4)).sum().backward()
    body.step()
    assert (model[2].weight == 2).all()
    assert (model.state_dict()["2.weight"] == 2).all()


def test_an_optimizer_may_step_by_another() -> None:
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    half_weights(net, outer := Ahead(inner))
    before = net.first.bias.detach().float().clone()
    net(batches()[0][0]).sum().backward()
    outer.step()
    assert not torch.equal(net.first.bias, before)
    with pytest.raises(
        UsageError, match=r"SGD.step\(\) on first.weight, first.bias, last.weight: only"
    ):
        inner.step()


def test_an_optimizer_of_another_model_steps_as_it_likes() -> None:
    net, _, half = small()
    other = Net()
    for model in (other, net):
        before = model.last.weight.detach().clone()
        update(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert not torch.equal(model.last.weight, before)
        half.close()  # then the first one is free as well


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own
def test_a_compiled_model_is_compiled_once() -> None:
    """It was compiled anew for each batch, until torch gave it up."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model = torch.compile(inner, backend=backend)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    half_weights(model, optimizer)
    counts = []
    for _ in range(4):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(graphs))
    assert counts == [1] * 4


@needs_torch_2_12
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own
def test_a_step_may_be_compiled() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        half_weights(net, optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            net(batches()[0][0]).square().mean().backward()
            step()
        results.append(net.state_dict())
    plain, found = results
    assert all(torch.equal(value, plain[name]) for name, value in found.items())
