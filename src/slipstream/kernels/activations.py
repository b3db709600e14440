"""Activations and their derivatives, for operations that end in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

ActivationName = Literal[
    "relu", "relu6", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "hardswish"
]


class Activation(NamedTuple):
    """``forward(z)``, and ``backward(gradient, kept)`` for the gradient of z."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    keeps_output: bool
    """Whether ``kept`` is the result, which the next layer mostly keeps, too; otherwise z."""


def _silu_backward(gradient: Tensor, z: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        moved: Tensor = _aten.silu_backward(gradient, z)
        return moved
    sigmoid = torch.sigmoid(z)  # for second derivatives, which torch's function has not
    return gradient * sigmoid * (1 + z * (1 - sigmoid))


ACTIVATIONS: dict[ActivationName, Activation] = {
    "relu": Activation(
        torch.relu, lambda g, y: _aten.threshold_backward(g, y, 0), keeps_output=True
    ),
    "relu6": Activation(
        F.relu6, lambda g, y: _aten.hardtanh_backward(g, y, 0.0, 6.0), keeps_output=True
    ),
    "sigmoid": Activation(torch.sigmoid, _aten.sigmoid_backward.default, keeps_output=True),
    "tanh": Activation(torch.tanh, _aten.tanh_backward.default, keeps_output=True),
    "gelu": Activation(F.gelu, _aten.gelu_backward.default, keeps_output=False),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda g, z: _aten.gelu_backward(g, z, approximate="tanh"),
        keeps_output=False,
    ),
    "silu": Activation(F.silu, _silu_backward, keeps_output=False),
    "hardswish": Activation(F.hardswish, _aten.hardswish_backward.default, keeps_output=False),
}
