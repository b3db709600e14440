"""One matrix, and how far one step of an optimizer moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def matrix(seed: int = 0, scale: float = 1.0, gradient_scale: float = 1.0) -> nn.Parameter:
    """A parameter with a gradient, both random."""
    random = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(scale * torch.randn(4, 6, generator=random))
    parameter.grad = gradient_scale * torch.randn(4, 6, generator=random)
    return parameter


def one_step(
    make: Callable[..., torch.optim.Optimizer], parameter: nn.Parameter, **settings: Any
) -> torch.Tensor:
    """How far one step moves it."""
    before = parameter.detach().clone()
    make([parameter], **settings).step()
    return before - parameter.detach()
