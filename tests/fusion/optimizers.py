"""Optimizers of tests, parameters of many kinds, and what a fused optimizer is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream.fusion import FusedOptimizer, fuse_optimizer
from slipstream.optim import Lamb

C = torch.optim


class Lion(torch.optim.Optimizer):
    """A user's own class, which binds its state anew in every step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moment = state.get("moment", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_((0.9 * moment + 0.1 * p.grad).sign(), alpha=-group["lr"])
                state["moment"] = 0.99 * moment + 0.01 * p.grad
                state["count"] = state.get("count", 0) + 1
        return loss


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: C.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: C.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: C.Adam(p, lr=0.01),
    "Adam, amsgrad": lambda p: C.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "AdamW": lambda p: C.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: C.Adagrad(p, lr=0.1, lr_decay=0.01),
    "RMSprop": lambda p: C.RMSprop(p, lr=0.01),
    "RMSprop, centered": lambda p: C.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "NAdam": lambda p: C.NAdam(p, lr=0.01),
    "RAdam": lambda p: C.RAdam(p, lr=0.01),
    "Adamax": lambda p: C.Adamax(p, lr=0.01),
    "Adadelta": lambda p: C.Adadelta(p),
    "ASGD": lambda p: C.ASGD(p, lr=0.01),
    "Rprop": lambda p: C.Rprop(p, lr=0.01),
    "Lion": Lion,
    "Lamb": lambda p: Lamb(p, lr=0.01),
}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Large and small ones, a vector, a number, an empty one, one in another order of memory."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(12, 13), (7,), (3, 4), (), (5,), (1, 70), (0, 3), (2, 3)]
    made = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    made[0] = made[0].t()
    made[2] = made[2].t()
    return [nn.Parameter(value) for value in made]


def groups(made: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": made[:3]}, {"params": made[3:], "lr": 0.003}]


def give_gradients(made: list[nn.Parameter], number: int) -> None:
    random = torch.Generator().manual_seed(100 + number)
    for p in made:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=random, dtype=p.dtype))


def fuse(optimizer: torch.optim.Optimizer) -> FusedOptimizer:
    return fuse_optimizer(optimizer, elementwise=isinstance(optimizer, Lion))


def check_same(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tolerance: float = 1e-5
) -> None:
    """Parameters and states are equal, and the state is in the user's format."""
    mine, plain = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == plain["param_groups"]
    assert sorted(mine["state"]) == sorted(plain["state"])
    for number, state in plain["state"].items():
        assert sorted(mine["state"][number]) == sorted(state)
        for key, value in state.items():
            torch.testing.assert_close(
                mine["state"][number][key], value, rtol=tolerance, atol=tolerance
            )
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert isinstance(p, nn.Parameter)
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
