"""Blocks that a repetition could easily get wrong come out the same, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.memory import recompute
from slipstream.strategy import Budget, Every, Recompute

WISHES = {"every": Every(), "two": Every(every=2), "all": Budget(budget=1.0)}


class Odd(nn.Module):
    """A residual block; subclasses say what is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0
        self.prepare()

    def prepare(self) -> None:
        """Make buffers."""

    def odd(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return x + self.odd(self.linear(x)).tanh()


class ZeroMean(Odd):
    """The first forward updates a running mean to what it is."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(4)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def odd(self, y: Tensor) -> Tensor:
        return self.norm(y)


class Later(Odd):
    """The first forward updates nothing, and later ones do."""

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(4))

    def odd(self, y: Tensor) -> Tensor:
        if self.step:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean.clone()


class Assigned(Later):
    """There is a new buffer each time, and none at first."""

    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def odd(self, y: Tensor) -> Tensor:
        mean = y.detach().mean(0)
        self.mean = mean if self.mean is None else self.mean.lerp(mean, 0.1)
        return y - self.mean


class Codebook(Odd):
    """A large buffer is updated behind autograd's back, and a mask is not."""

    def prepare(self) -> None:
        self.register_buffer("codes", torch.zeros(2**13, 4))
        self.register_buffer("mask", torch.ones(2**17, dtype=torch.bool))

    def odd(self, y: Tensor) -> Tensor:
        if self.step:
            self.codes.data[0] += y.detach().mean(0)
        return (y - self.codes[0].clone()) * self.mask[:4]


class Shared(Odd):
    """Two places hold one buffer."""

    def prepare(self) -> None:
        self.inner = nn.Module()
        self.register_buffer("mean", torch.zeros(4))
        self.inner.register_buffer("mean", self.mean)

    def odd(self, y: Tensor) -> Tensor:
        self.mean.add_(y.detach().mean(0))
        return y - self.inner.mean.clone()  # type: ignore[operator]


def trained(block: type[Odd], wish: Recompute | None) -> dict[str, Any]:
    """Losses, gradients and state of a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    recomputed = recompute(model, wish) if wish is not None else None
    seen: dict[str, Any] = {}
    for step in range(3):
        for inner in model:
            inner.step = step
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        seen |= {f"loss {step}": loss.detach()}
        seen |= {f"{step} {name}": value.clone() for name, value in model.state_dict().items()}
        seen |= {f"{step} {name} grad": p.grad for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    if recomputed is not None:
        recomputed.close()
    return seen


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("block", [ZeroMean, Later, Assigned, Codebook, Shared])
def test_bitwise_as_without(block: type[Odd], wish: str) -> None:
    plain, found = trained(block, None), trained(block, WISHES[wish])
    assert found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []
