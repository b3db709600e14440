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


def distinct_name(optimizer: Optimizer) -> str:
    """Name of the optimizer's class; with its module where another package's has the name of one
    that is known.

    Example:
        >>> class Lamb(torch.optim.SGD):
        ...     __module__ = "timm.optim.lamb"
        >>> distinct_name(Lamb([torch.zeros(1)]))
        'timm.optim.lamb.Lamb'
    """
    kind = type(optimizer)
    known = {"Lars", "Lamb", *(each.__name__ for each in ELEMENTWISE)}
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__name__ in known else kind.__name__


def acts_elsewhere(optimizer: object) -> str | None:
    """Say how an optimizer changes parameters outside of its own ``step()``, where hooks of the
    step cannot exchange their data; None: it does not, as far as one can see.

    Example:
        >>> acts_elsewhere(torch.optim.SGD([torch.zeros(1)]))
        >>> class Averaging(torch.optim.SGD):
        ...     def eval(self): ...
        >>> acts_elsewhere(Averaging([torch.zeros(1)]))
        'has a method eval() that changes parameters outside of step()'
    """
    if not isinstance(optimizer, Optimizer):
        return "is no torch.optim.Optimizer, whose step has hooks"
    for verb in ("eval", "train"):  # schedule-free optimizers: https://arxiv.org/abs/2405.15682
        if callable(getattr(optimizer, verb, None)):
            return f"has a method {verb}() that changes parameters outside of step()"
    for name, value in vars(optimizer).items():
        inner = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, Optimizer) for each in inner):
            return f"steps another optimizer inside its own step() ({name})"
    return None
