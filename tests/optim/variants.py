"""Every variant of both optimizers, by name: add one here, and it gets the whole battery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slipstream.optim import Lamb, Lars, lamb, lars


@dataclass(frozen=True)
class Variant:
    make: Callable[..., Lars | Lamb]
    one_by_one: Callable[[Any], None]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: Iterable[Any], **more: Any) -> Lars | Lamb:
        return self.make(params, **{**self.settings, **more})


def _lars(**settings: Any) -> Variant:
    return Variant(Lars, lars.step_one_by_one, {"lr": 2.0, "weight_decay": 0.01, **settings})


def _lamb(**settings: Any) -> Variant:
    return Variant(Lamb, lamb.step_one_by_one, {"lr": 0.02, **settings})


VARIANTS = {
    "lars": _lars(),
    "lars, no momentum": _lars(momentum=0.0),
    "lars, nesterov": _lars(nesterov=True),
    "lars, as in the paper": _lars(lr_in_velocity=True, eps=0.0),
    "lars, as in the paper, nesterov": _lars(lr_in_velocity=True, nesterov=True),
    "larc": _lars(clip=True, trust_coefficient=0.02, lr=0.01),
    "larc, as in the paper": _lars(clip=True, lr_in_velocity=True, lr=0.002),
    "lars, no decay": _lars(weight_decay=0.0),
    "lars, vectors too": _lars(adapt_vectors=True, decay_vectors=True),
    "lars, vectors decay": _lars(decay_vectors=True),
    "lars, vectors adapt": _lars(adapt_vectors=True),
    "lars, undecayed not adapted": _lars(weight_decay=0.0, adapt_undecayed=False),
    "lars, exclude": _lars(exclude=("*.bias", "linear.*")),
    "lamb": _lamb(),
    "lamb, no bias correction": _lamb(bias_correction=False),
    "lamb, pre-normalised": _lamb(max_grad_norm=0.5),
    "lamb, no averaging": _lamb(grad_averaging=False),
    "lamb, ratio clipped": _lamb(clip_ratio=(0.01, 0.5)),
    "lamb, weight norm clipped": _lamb(clip_weight_norm=(0.5, 2.0)),
    "lamb, no decay": _lamb(weight_decay=0.0),
    "lamb, vectors too": _lamb(adapt_vectors=True, decay_vectors=True),
    "lamb, undecayed not adapted": _lamb(weight_decay=0.0, adapt_undecayed=False),
    "lamb, exclude": _lamb(exclude=("*.bias", "linear.*")),
    "lamb, all": _lamb(
        max_grad_norm=0.5, clip_ratio=(0.01, 10.0), clip_weight_norm=(0.0, 10.0),
        adapt_vectors=True, exclude=("scale",),
    ),
}  # fmt: skip

SHAPES = {
    "conv.weight": (4, 3, 3, 3),
    "linear.weight": (5, 7),
    "linear.bias": (5,),
    "scale": (),
    "zeros.weight": (3, 3),
    "empty.weight": (0, 4),
    "unused.weight": (2, 2),
}

Named = list[tuple[str, nn.Parameter]]


def parameters(
    *, copies: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Named:
    """Parameters of many shapes: one of zeros, one empty, one that never gets a gradient."""
    random = torch.Generator().manual_seed(0)
    found: Named = []
    for copy in range(copies):
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=random)
            if name == "zeros.weight":
                values.zero_()
            prefix = f"{copy}." if copy else ""
            found.append((prefix + name, nn.Parameter(values.to(device, dtype))))
    return found


def give_gradients(named: Named, step: int) -> None:
    """The gradients of one step: the same for equal steps and shapes."""
    random = torch.Generator().manual_seed(100 + step)
    for name, parameter in named:
        gradient = torch.randn(parameter.shape, generator=random)
        if not name.endswith("unused.weight"):
            parameter.grad = gradient.to(parameter)


def values(named: Named) -> list[torch.Tensor]:
    """Copies of what the parameters are."""
    return [parameter.detach().clone() for _, parameter in named]


def same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Whether all are bitwise equal, and none is a NaN."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
