"""Whatever changes after fusion, the model computes what it would without."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook

from slipstream.fusion import fuse_patterns

pytestmark = pytest.mark.usefixtures("without_compilation")

FACTOR = 1.0
TABLE = ([1.0],)


def helper(x: Tensor) -> Tensor:
    return x * 1.0


class Config:
    scale = 1.0


class Block(nn.Module):
    """Reads settings in all the ways that people do."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.other, self.bn2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.0)
        self.depthwise = nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.config, self.deep = Config(), types.SimpleNamespace(by=types.SimpleNamespace(n=1.0))
        self.own, self.hidden, self.in_tuple, self.function = 1.0, 1.0, ([1.0],), helper

    @property
    def seen(self) -> float:
        return self.hidden

    def method(self, x: Tensor) -> Tensor:
        return x * 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        y = self.act(self.bn2(self.other(y)) + x)
        y = y * self.of_class * self.config.scale * FACTOR * self.own * self.in_tuple[0][0]
        y = y * self.seen * self.deep.by.n * TABLE[0][0] * (1 - self.drop.p)
        y = self.method(self.function(helper(y)))
        if torch.is_grad_enabled():
            y = y * 2
        if self.drop.training:
            y = y * 3
        if torch.is_autocast_enabled("cpu"):
            y = y * 5
        y = y * torch.get_default_dtype().itemsize
        return x + self.depthwise(self.act(self.conv(y)))


Undo = Callable[[], object] | None
Change = Callable[[Any], Undo]


def attribute(path: str, value: object) -> Change:
    def change(block: Any) -> None:
        *ahead, name = path.split(".")
        for part in ahead:
            block = getattr(block, part)
        setattr(block, name, value)

    return change


def restored(holder: Any, name: str, value: object) -> Change:
    """A change outside of the block."""

    def change(_: Any) -> Undo:
        before = vars(holder)[name]
        setattr(holder, name, value)
        return lambda: setattr(holder, name, before)

    return change


def in_a_list(block: Any) -> None:
    block.in_tuple[0][0] = 4.0


def in_a_global_list(_: Any) -> Undo:
    TABLE[0][0] = 4.0
    return lambda: TABLE[0].__setitem__(0, 1.0)


def class_of_the_norm(block: Any) -> None:
    block.bn.__class__ = type("Other", (nn.BatchNorm2d,), {"forward": lambda self, x: 2 * x})


def default_dtype(_: Any) -> Undo:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def doubled(module: Any, given: Any, out: Any) -> Any:
    return 2 * out


def hook_of_all(_: Any) -> Undo:
    def double(module: Any, given: Any, out: Any) -> Any:
        return 2 * out if isinstance(module, nn.BatchNorm2d) else None

    return register_module_forward_hook(double).remove


def hook_that_keeps(block: Any) -> None:
    block.bn.register_forward_hook(lambda module, given, out: setattr(block, "kept", out.clone()))


def circular(block: Any) -> None:
    block.conv.padding_mode, block.conv._reversed_padding_repeated_twice = "circular", [1] * 4


def without_statistics(block: Any) -> None:
    block.bn.running_mean = block.bn.running_var = None


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


CHANGES: dict[str, Change] = {
    "nothing": lambda block: None,
    "a class attribute, on the instance": attribute("of_class", 2.0),
    "a class attribute, on the class": restored(Block, "of_class", 2.0),
    "a setting": attribute("own", 2.0),
    "a setting of a child": attribute("drop.p", 0.5),
    "a field of an object": attribute("config.scale", 3.0),
    "a field of a class": restored(Config, "scale", 3.0),
    "a nested field": attribute("deep.by.n", 3.0),
    "a global": lambda block: restored(_module(), "FACTOR", 3.0)(block),
    "a list in a tuple": in_a_list,
    "a list in a global tuple": in_a_global_list,
    "behind a property": attribute("hidden", 3.0),
    "a property": restored(Block, "seen", property(lambda self: 3.0)),
    "a method": attribute("method", lambda x: x * 3),
    "a method of the class": restored(Block, "method", lambda self, x: x * 3),
    "forward of the class": restored(Block, "forward", lambda self, x: self.act(self.bn(x))),
    "a function": attribute("function", lambda x: x * 3),
    "a global function": lambda block: restored(_module(), "helper", lambda x: x * 3)(block),
    "training of a child": attribute("drop.training", False),
    "training of the batch norm": attribute("bn.training", False),
    "training": lambda block: block.eval() and None,
    "momentum": attribute("bn.momentum", 0.5),
    "no momentum": attribute("bn.momentum", None),
    "eps": attribute("bn.eps", 0.5),
    "no statistics": without_statistics,
    "weights": attribute("bn.weight", nn.Parameter(torch.full((3,), 2.0))),
    "no weights": attribute("bn.weight", None),
    "another batch norm": attribute("bn", nn.BatchNorm2d(3, eps=0.5)),
    "another kind of norm": attribute("bn", nn.InstanceNorm2d(3)),
    "another activation": attribute("act", nn.Tanh()),
    "no activation": attribute("act", nn.Identity()),
    "another class of layer": attribute("act", Module()),
    "in place": attribute("act.inplace", True),
    "forward of the batch norm": attribute("bn.forward", lambda x: 2 * x),
    "forward of the activation": attribute("act.forward", lambda x: 2 * x),
    "class of the batch norm": class_of_the_norm,
    "forward of all batch norms": restored(_BatchNorm, "forward", lambda self, x: 2 * x),
    "forward of all relus": restored(nn.ReLU, "forward", lambda self, x: 2 * x),
    "stride": attribute("depthwise.padding", (1, 1)),
    "groups": attribute("depthwise", nn.Conv2d(3, 3, 3, padding=1)),
    "padding": circular,
    "a hook of the batch norm": lambda block: block.bn.register_forward_hook(doubled) and None,
    "a hook of the activation": lambda block: block.act.register_forward_hook(doubled) and None,
    "a hook before the activation": lambda block: (
        block.act.register_forward_pre_hook(lambda _, given: (given[0] - 1,)) and None
    ),
    "a hook of the block": lambda block: block.register_forward_hook(doubled) and None,
    "a hook of gradients": lambda block: (
        block.bn.register_full_backward_hook(lambda _, into, out: (2 * into[0],)) and None
    ),
    "a hook that keeps": hook_that_keeps,
    "a hook of all modules": hook_of_all,
    "the default type": default_dtype,
    "the type": lambda block: block.double() and None,
    "frozen": lambda block: block.requires_grad_(False) and None,
}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def _module() -> Any:
    return sys.modules[__name__]


def pair() -> tuple[Any, Any, Any]:
    """A fused block, the same without, and the handle."""
    torch.manual_seed(0)
    block = Block()
    plain = copy.deepcopy(block)
    fused = fuse_patterns(block)
    same(block, plain, torch.randn(2, 3, 6, 6))
    assert len(fused.ran) == 3, "nothing is tested"
    return block, plain, fused


def passed(block: Any, x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers."""
    block.zero_grad()
    given = x.clone().requires_grad_(not torch.is_inference_mode_enabled())
    out = block(given)
    if out.requires_grad:
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    gradients = [p.grad for p in (given, *block.parameters()) if p.grad is not None]
    return [out, *gradients, *block.buffers(), *([block.kept] if hasattr(block, "kept") else [])]


def same(block: Any, plain: Any, x: Tensor, tolerance: float = 2e-4) -> None:
    for one, other in zip(passed(block, x), passed(plain, x), strict=True):
        assert (type(one), one.dtype) == (type(other), other.dtype)
        size = max(1.0, float(other.detach().float().abs().max()))
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change(change: str) -> None:
    block, plain, fused = pair()
    undo = [CHANGES[change](each) for each in (plain, block)]
    try:
        dtype = next(block.parameters()).dtype
        for shape in ((2, 3, 6, 6), (5, 3, 4, 4)):
            same(block, plain, torch.randn(shape, dtype=dtype))
    finally:
        for each in undo[::-1]:
            _ = each and each()
    if not change.startswith("forward of the"):  # else the user's own would be lost
        fused.close()
        assert not any("forward" in vars(module) for module in block.modules())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mode", [True, False])
def test_under_a_context(context: str, mode: bool) -> None:
    block, plain, _ = pair()
    for each in (block, plain):
        each.train(mode)
    with CONTEXTS[context]():
        same(block, plain, torch.randn(2, 3, 6, 6), 0.1 if context == "autocast" else 1e-4)
    same(block, plain, torch.randn(2, 3, 6, 6), 0.1 if context == "autocast" else 2e-4)
