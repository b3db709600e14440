"""What stands around a chain, or looks at its inner results later: right, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slipstream.errors import ModelError, UsageError
from slipstream.fusion import fuse_patterns

pytestmark = pytest.mark.usefixtures("without_compilation")


class Model(nn.Module):
    """A layer that ends in a batch norm, an activation, a sum and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.act, self.conv = nn.ReLU(), nn.Conv2d(3, 3, 1)
        self.depthwise = nn.Conv2d(3, 3, 3, padding=1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        y = self.act(self.conv(y) + x)
        return self.depthwise(self.act(self.conv(y)))  # type: ignore[no-any-return]


def pair() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    return model, plain, fuse_patterns(model)


def gradients(model: Any, x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    out = model(given)
    return [out, *torch.autograd.grad(out.square().sum(), [given, *model.parameters()])]


class ChangesInputs(TorchFunctionMode):
    """Sees tensors and computes with them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.batch_norm, F.relu, torch.conv2d):
            assert isinstance(args[0], Tensor)
            args = (args[0] * 2, *args[1:])
        return func(*args, **(kwargs or {}))


def of_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    own = F.batch_norm
    monkeypatch.setattr(F, "batch_norm", lambda x, *a, **k: 2 * own(x * 3, *a, **k))


def of_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    own = F.relu
    monkeypatch.setattr(F, "relu", lambda *a, **k: 2 * own(*a, **k))


def of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    own = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *a, **k: 2 * own(x * 3, *a, **k))


@pytest.mark.parametrize("replace", [of_batch_norm, of_relu, of_convolutions, None])
def test_replaced_functions_and_modes_apply_once(
    replace: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, _ = pair()
    around: AbstractContextManager[Any] = nullcontext()
    if replace is None:
        around = ChangesInputs()
    else:
        replace(monkeypatch)
    x = torch.randn(2, 3, 6, 6)
    with around:
        ours, torchs = gradients(model, x), gradients(plain, x)
    torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-3)


LATER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "its gradient": lambda out, kept: torch.autograd.grad(out.sum(), kept),
    "one of several": lambda out, kept: torch.autograd.grad(out.sum(), inputs=[kept]),
    "a hook": lambda out, kept: kept.register_hook(lambda g: 2 * g),
    "its grad": lambda out, kept: kept.retain_grad(),
    "its node": lambda out, kept: kept.grad_fn.register_hook(print),  # type: ignore[union-attr]
    "an edge": lambda out, kept: torch.autograd.graph.get_gradient_edge(kept),
}


@pytest.mark.parametrize("asked", LATER)
def test_gradients_of_a_result_that_a_chain_has_passed_are_refused(asked: str) -> None:
    model, plain, fused = pair()
    for each in (model, plain):
        results: list[Tensor] = []
        each.first.register_forward_hook(lambda layer, x, y, r=results: r.append(y))
        out = each(torch.randn(2, 3, 6, 6))
        assert fused.ran
        (kept,) = results
        if each is plain:
            LATER[asked](out, kept)
            continue
        with pytest.raises(ModelError, match=r"ask before it is used.*leave out compute"):
            LATER[asked](out, kept)
        torch.testing.assert_close(kept.detach(), kept * 1)


def test_gradients_of_many_at_once() -> None:
    """Backward under a vmap."""
    model, plain, _ = pair()
    x, found = torch.randn(2, 3, 6, 6), []
    for each in (model, plain):
        given = x.clone().requires_grad_()
        out = each(given)
        many = torch.stack([torch.ones_like(out), torch.linspace(0, 1, out.numel()).view_as(out)])
        found += torch.autograd.grad(out, given, many, is_grads_batched=True)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_torch_script_takes_a_copy() -> None:
    model, plain, _ = pair()
    layers = nn.Sequential(model.first, model.act)
    with pytest.raises(UsageError, match=r"copy.deepcopy\(model\)"):
        torch.jit.script(layers)
    x = torch.randn(2, 3, 6, 6)
    scripted = torch.jit.script(copy.deepcopy(layers))
    torch.testing.assert_close(scripted(x), plain.act(plain.first(x)))
