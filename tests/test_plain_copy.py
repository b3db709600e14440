"""Copies of modules and tensors to which something is attached."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from slipstream.errors import UsageError
from slipstream.memory.forward_override import ForwardOverride
from slipstream.plain_copy import attach, copy_as

X = torch.ones(2, 3)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
Copied = Callable[[Any], Any]


def add_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


def halve_state(module: nn.Module, state: Any, prefix: str, _: object) -> None:
    for name in state:
        state[name] = state[name] / 2


class Own(nn.Module):
    """Copies itself in ways of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.copies = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo), copies=self.copies + 1)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copies": self.copies + 1}


def hooks_of(module: nn.Module) -> list[Any]:
    return [
        hook
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
        for hook in hooks.values()
    ]


@WAYS
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 3), Own])
def test_a_copy_has_the_users_hooks_alone(copied: Copied, build: Callable[[], nn.Module]) -> None:
    module = build()
    plain, before = copied(module), dict(vars(module))
    own = module.register_forward_hook(add_one)
    removes = [
        attach(module.register_forward_hook, lambda *_: None, always_call=True),
        attach(module.register_forward_pre_hook, lambda *_: None, with_kwargs=True),
        attach(module.register_full_backward_hook, lambda *_: None),
        attach(module.register_state_dict_post_hook, halve_state),
        attach(module.register_load_state_dict_pre_hook, lambda *_: None),
    ]
    override = ForwardOverride(module, lambda forward, x: 2 * forward(x))
    twin = copied(module)
    assert type(twin) is type(module)
    assert hooks_of(twin) == [add_one]
    assert vars(twin).keys() == vars(plain).keys()
    torch.testing.assert_close(twin(X), plain(X) + 1)
    torch.testing.assert_close(module(X), 2 * plain(X) + 1)
    override.remove()
    own.remove()
    for remove in removes:
        remove()
    assert vars(module).keys() == before.keys()
    assert hooks_of(module) == []


@WAYS
def test_overrides_of_the_user_below_and_above_are_copied(copied: Copied) -> None:
    layer = nn.ReLU()
    layer.forward = torch.sigmoid  # type: ignore[method-assign]
    override = ForwardOverride(layer, lambda forward, x: 2 * forward(x))
    twin = copied(layer)
    torch.testing.assert_close(twin(X), torch.sigmoid(X))
    assert vars(twin)["forward"] is torch.sigmoid
    torch.testing.assert_close(layer(X), 2 * torch.sigmoid(X))
    override.remove()
    assert vars(layer)["forward"] is torch.sigmoid
    assert "__reduce_ex__" not in vars(layer)


def test_a_parametrised_module_is_copied_plainly() -> None:
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    plain = layer(X)
    ForwardOverride(layer, lambda forward, x: 2 * forward(x))
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(X), plain)
    assert "forward" not in vars(twin)


@WAYS
def test_tied_tensors_and_their_optimizer_are_copied_once(copied: Copied) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    model[0].weight.flag = "kept where torch keeps it"  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = copy_as(model[0].weight, lambda: torch.full((3, 3), 5.0))
    twin, its = copied([model, optimizer])
    assert twin[0].weight is twin[1].weight is its.param_groups[0]["params"][0]
    assert type(twin[0].weight) is nn.Parameter
    assert not twin[0].weight.requires_grad
    assert twin[0].weight.unique().item() == 5
    end()
    assert vars(model[0].weight) == {"flag": "kept where torch keeps it"}
    assert torch.equal(copied(model)[0].weight, model[0].weight)


def test_a_shallow_copy_shares_the_tensors() -> None:
    layer = nn.Linear(3, 3)
    ForwardOverride(layer, lambda forward, x: 2 * forward(x))
    twin = copy.copy(layer)
    assert twin.weight is layer.weight
    torch.testing.assert_close(2 * twin(X), layer(X))


def test_a_module_with_attached_hooks_is_scripted_as_a_copy() -> None:
    layer = nn.Linear(3, 2)
    model, before = nn.Sequential(layer), dict(vars(layer))
    jit: Any = torch.jit
    remove = attach(layer.register_forward_hook, add_one)
    for whole in (layer, model):
        with pytest.raises(UsageError, match="script a plain copy"):
            jit.script(whole)
        torch.testing.assert_close(jit.script(copy.deepcopy(whole))(X), layer(X) - 1)
    assert model[0] is layer
    remove()
    assert vars(layer) == before
    torch.testing.assert_close(jit.script(model)(X), layer(X))
