"""Which optimizers treat every value of a parameter on its own, and what they count."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.ASGD, torch.optim.Rprop),
)
"""Optimizers of torch that treat every value on its own."""

COUNTERS = ("step", "mu_product", "eta", "mu")
"""State of torch's optimizers that is a number for a whole parameter."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that do; subclasses may do anything.

    Example:
        >>> is_elementwise(torch.optim.RMSprop([torch.zeros(1)]))
        True
    """
    return type(optimizer) in ELEMENTWISE
