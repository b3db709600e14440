"""The engine of a single replica: no other rank holds this model, so its gradients are the average.

Never communicates. Ranks that share one model (tensor or pipeline parallel) and have no data
parallel peers use it, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from slipstream.gradients.interface import GradientEngine
from slipstream.strategy import Split


class SingleReplicaEngine(GradientEngine):
    """An engine that exchanges nothing, and divides gradients by the loss scale.

    Args:
        parameters: all parameters of the model.
        split: of the strategy; there is nothing to split.

    Exactness: bitwise against a plain training loop.
    """

    overflowed = False

    def __init__(self, parameters: Iterable[nn.Parameter], split: Split) -> None:
        self._parameters, self.split = tuple(parameters), split
        self._exchange = False
        self._loss_scale = 1.0
        self._unscaled = False  # whether the gradients were divided by the loss scale

    def begin(self, *, exchange: bool, scale: float, loss_scale: float = 1.0) -> None:
        if self._unscaled:  # autograd adds to these gradients: all must have the loss scale
            self._multiply(loss_scale)
            self._unscaled = False
        self._exchange, self._loss_scale = exchange, loss_scale

    def end(self) -> None:
        if self._exchange and self._loss_scale != 1.0:
            self._multiply(1.0 / self._loss_scale)
            self._unscaled = True

    def updated(self, step: int) -> None:
        self._unscaled = False

    def _multiply(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
