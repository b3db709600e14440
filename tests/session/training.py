"""A small model, and sessions that train it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import slipstream

Session = slipstream.Session[nn.Module, torch.optim.Optimizer]
BATCH = torch.arange(8.0).reshape(2, 4)


def small() -> nn.Module:
    """Two layers, four gradients; always the same values."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accelerate_and_close(model: Any, optimizer: Any = None, strategy: Any = None) -> None:
    slipstream.accelerate(model, optimizer or sgd(model), strategy=strategy).close()


def opened(strategy: Any = None, loader: Any = None) -> Session:
    """A session that trains the small model with momentum."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return slipstream.accelerate(model, optimizer, loader, strategy)


def loss_of(session: Session) -> torch.Tensor:
    return session.model(BATCH).square().mean()  # type: ignore[no-any-return]


def update(session: Session) -> bool:
    """One backward pass and its step."""
    session.backward(loss_of(session))
    return session.step()
