"""DGC takes the optimizer's momentum over, gives it back, and refuses what it cannot apply."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import ModelError, UsageError
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.gradients.segments import parameters_of
from tests.gradients.codecs import (
    sgd,
    step_of,
    wide,
)
from tests.harness import reference
from tests.harness.models import MODELS


class Picture(nn.Module):
    """A convolution in another memory format, a frozen layer, and one that nobody optimizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x.view(-1, 3, 4, 4)[:, :, :3, :3]).flatten(1)
        return self.extra(self.frozen(hidden.tanh())).square().mean()


def dgc_of_a_picture() -> float:
    """DGC at density 1, with decay, against SGD itself."""
    models = []
    for codec in (None, {"kind": "dgc", "density": 1.0, "warmup_steps": 0}):
        torch.manual_seed(0)
        model = Picture()
        optimized = [*model.conv.parameters(), *model.frozen.parameters()]
        optimizer = torch.optim.SGD(optimized, lr=0.1, momentum=0.9, weight_decay=0.1)
        with slipstream.accelerate(model, optimizer, None, {"gradients": {"codec": codec}}) as s:
            for step in range(4):
                seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
                s.backward(model(torch.randn(2, 48, generator=seed)))
                s.step()
        models.append(model)
    return reference.distance(*models)


def test_decay_finds_its_weights_whatever_their_memory_format(two) -> None:
    for far in two.run(dgc_of_a_picture):
        assert far <= 1


def refused(codec: object, optimizer: str) -> str:
    model = wide()
    half = [model.first.weight], [model.second.weight, model.second.bias]
    optimizers = {
        "adam": lambda: torch.optim.AdamW(model.parameters()),
        "dampening": lambda: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, dampening=0.1
        ),
        "mixed group": lambda: sgd(model),
        "groups": lambda: torch.optim.SGD([{"params": p} for p in half], lr=0.1, momentum=0.9),
    }
    try:
        slipstream.accelerate(
            model, optimizers[optimizer](), None, {"gradients": {"codec": codec}}
        ).close()
    except ModelError as error:
        return str(error)
    return ""


FIRST_ONLY = {"kind": "by_name", "rules": [{"match": "first.*", "codec": "dgc"}]}


@pytest.mark.parametrize(
    ("optimizer", "codec", "said"),
    [
        ("adam", "dgc", "dgc with AdamW"),
        ("dampening", "dgc", "dampening 0.1"),
        ("mixed group", FIRST_ONLY, "group 0 holds parameters with and without"),
        ("groups", FIRST_ONLY, ""),
        ("adam", "powersgd", ""),
    ],
)
def test_dgc_takes_momentum_over_or_refuses(two, optimizer, codec, said) -> None:
    for text in two.run(refused, codec, optimizer):
        assert said in text
        assert bool(said) == bool(text)


def sparse_dgc() -> str:
    case = MODELS["sparse"]
    with pytest.raises(ModelError) as caught:
        reference.accelerated(case, "sgd", 1, 1, {"codec": "dgc"})
    return str(caught.value)


def test_dgc_refuses_gradients_that_it_cannot_code(two) -> None:
    for text in two.run(sparse_dgc):
        assert "has sparse gradients" in text
        assert "group of its own" in text


def take_over_and_give_back() -> None:
    model = wide()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
    )
    (group,) = optimizer.param_groups
    session = slipstream.accelerate(model, optimizer, None, {"gradients": {"codec": "dgc"}})
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.0, 0.0, False)
    step_of(session, 0)
    group["momentum"] = 0.5
    with pytest.raises(UsageError, match=r"momentum became 0\.5.*OneCycleLR"):
        step_of(session, 1)
    session.close()
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 0.01, True)


def test_momentum_is_taken_over_and_given_back(two) -> None:
    two.run(take_over_and_give_back)


def test_other_settings_than_those_that_it_applies_are_refused() -> None:
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = slipstream.Strategy.load({"gradients": {"codec": "dgc"}}).gradients.codec
    trainables = parameters_of(model, trainable=True)
    correction = MomentumCorrection(optimizer, trainables, config, 1)
    own = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(own)
    other["param_groups"][0]["momentum_correction"]["momentum"] = 0.8  # of another run
    optimizer.load_state_dict(other)
    with pytest.raises(UsageError, match=r"dgc applies .*0\.9.*now has .*0\.8.*before accelerate"):
        correction.check()
    optimizer.load_state_dict(own)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(UsageError, match="maximize True; allowed"):
        correction.check()
    optimizer.param_groups = [{**optimizer.param_groups[0], "maximize": False}]
    correction.check()
    correction.give_back()
    assert optimizer.param_groups[0]["momentum"] == 0.9


def dense_dgc() -> float:
    """DGC at density 1 against SGD with momentum, from a run that has momentum already."""
    models = wide(), wide()
    for model, codec in zip(
        models, (None, {"kind": "dgc", "density": 1.0, "warmup_steps": 0}), strict=True
    ):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
        )
        with slipstream.accelerate(model, optimizer) as session:
            for step in range(2):
                step_of(session, step)
        strategy = {"gradients": {"codec": codec}}
        with slipstream.accelerate(model, optimizer, None, strategy) as session:
            for step in range(2, 6):
                step_of(session, step)
    return reference.distance(*models)


def test_dgc_at_density_one_is_the_optimizers_own_momentum(two) -> None:
    for far in two.run(dense_dgc):
        assert far <= 1


def reloaded() -> str:
    """States of model and optimizer of an earlier moment, and at first not that of the session."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = {"gradients": {"codec": "dgc"}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:

        def step(number: int) -> None:
            torch.manual_seed(10 * number + dist.get_rank())
            session.backward(model(torch.randn(4, 40)).square().mean())
            session.step()

        step(0)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
        step(1)
        first = copy.deepcopy(model.state_dict())
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        with pytest.raises(UsageError) as refusal:
            step(1)
        optimizer.zero_grad()  # the script skips that update
        for order in ((1, 2), (2, 1)):
            model.load_state_dict(saved[0])
            for part in order:
                (model, optimizer, session)[part].load_state_dict(saved[part])
            step(1)
            for mine, theirs in zip(model.state_dict().values(), first.values(), strict=True):
                assert torch.equal(mine, theirs)
    return str(refusal.value)


def test_a_state_of_the_optimizer_alone_does_not_bring_the_momentum_back(two) -> None:
    for text in two.run(reloaded):
        assert "session.load_state_dict(state)" in text


def extended() -> str:
    """Progressive unfreezing: layers come to the optimizer's group later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    with slipstream.accelerate(model, optimizer, None, {"gradients": {"codec": "dgc"}}) as session:
        session.backward(model(torch.ones(2, 4)).mean())
        session.step()
        optimizer.param_groups[0]["params"].extend(model[0].parameters())
        session.backward(model(torch.ones(2, 4)).mean())
        with pytest.raises(UsageError) as caught:
            session.step()
        optimizer.param_groups[0]["params"][2:] = []
        session.step()
    return str(caught.value)


def test_parameters_that_come_to_a_group_later_are_refused(two) -> None:
    for said in two.run(extended):
        assert "to which gradients.codec dgc applies no momentum" in said


def own_gradients() -> str:
    """A script computes and averages gradients itself, in a session that never calls backward."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with slipstream.accelerate(model, optimizer, None, {"gradients": {"codec": "dgc"}}):
        before = model.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(UsageError) as caught:
            optimizer.step()
        assert torch.equal(model.weight, before)
        optimizer.zero_grad()
    return str(caught.value)


def test_gradients_of_the_scripts_own_are_refused_as_they_would_have_no_momentum(two) -> None:
    for said in two.run(own_gradients):
        assert "these would have none" in said
