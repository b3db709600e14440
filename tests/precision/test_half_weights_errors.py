"""What half weights refuse, and what an error leaves behind."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.precision import half_weights
from tests.harness.models import MODELS
from tests.harness.reference import OPTIMIZERS
from tests.precision.half_models import Net, batches, halves, make, small


def test_a_step_that_fails_leaves_the_model_as_it_is() -> None:
    net, optimizer, _ = small()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert net(batches()[0][0]).isfinite().all()
    assert net.first.weight.dtype == torch.bfloat16


def step_of_another() -> None:
    _model, _body, head = halves()  # the model alone keeps half weights alive
    head.step()


class Around(torch.optim.Optimizer):
    """Lookahead and its kin."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a slip": (
        lambda: small(float_modules=["lasst"]),
        StrategyError,
        "'lasst' matches no module; did you mean 'last'?",
    ),
    "half of a tied parameter": (
        lambda: half_weights(
            (tied := MODELS["tied"].build()), OPTIMIZERS["sgd"](tied), float_modules=["decoder"]
        ),
        StrategyError,
        "decoder.weight is tied to embedding.weight",
    ),
    "an optimizer with a closure": (
        lambda: half_weights((net := Net()), torch.optim.LBFGS(net.parameters())),
        ModelError,
        "LBFGS: it computes losses inside its step",
    ),
    "an optimizer around another one": (
        lambda: half_weights((net := Net()), Around(torch.optim.SGD(net.parameters()))),
        ModelError,
        "Around, whose __init__ does not call Optimizer.__init__()",
    ),
    "an optimizer of another model": (
        lambda: half_weights(Net(), torch.optim.SGD(Net().parameters())),
        ModelError,
        "SGD, which holds no parameter of the model",
    ),
    "half weights twice": (
        lambda: half_weights(*small()[:2]),
        ModelError,
        "already has half weights (first.weight is torch.bfloat16 with fp32 gradients)",
    ),
    "another optimizer": (
        step_of_another,
        UsageError,
        "SGD.step() on 2.weight, 2.bias: only the SGD passed to half_weights steps",
    ),
    "a model in double precision": (
        lambda: half_weights((net := Net().double()), torch.optim.SGD(net.parameters())),
        ModelError,
        "(first.weight is torch.float64, first.bias is torch.float64, last.weight is torch.float64",
    ),
    "a model that stays fp32": (
        lambda: small(float_modules=["*"]),
        ModelError,
        "(there is none); call model.float() first, or name fewer float_modules",
    ),
    "a closure": (
        lambda: small()[1].step(lambda: 0.0),
        UsageError,
        "compute loss and gradients before optimizer.step()",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused(name: str) -> None:
    act, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        act()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "name"), [(Tensor, "to"), (nn.Module, "register_state_dict_post_hook")]
)
def test_one_that_fails_half_way_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    calls, works = count(1), getattr(owner, name)

    def third_fails(self: Any, *args: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError
        return works(self, *args)

    net = Net()
    optimizer = make("sgd", net.parameters())
    F.mse_loss(net(torch.ones(2, 5)), torch.ones(2, 4)).backward()
    before = copy.deepcopy([(p.data, p.grad) for p in net.parameters()])
    monkeypatch.setattr(owner, name, third_fails)
    with pytest.raises(MemoryError):
        half_weights(net, optimizer)
    for (value, gradient), p in zip(before, net.parameters(), strict=True):
        assert p.dtype == p.grad_dtype == torch.float32
        assert torch.equal(p.data, value)
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)
    for owned in (optimizer, *net.modules()):
        assert [n for n, kept in vars(owned).items() if n.endswith("_hooks") and kept] == []
