"""The engine of a single replica: no other rank holds this model, so its gradients are the average.

Never communicates. Ranks that share one model (tensor or pipeline parallel) and have no data
parallel peers use it, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from slipstream.gradients.interface import GradientEngine
from slipstream.strategy import SplitConfig


class SingleReplicaEngine(GradientEngine):
    """An engine that exchanges nothing, and scales gradients to the mean of their window.

    Args:
        parameters: all parameters of the model.
        split: of the strategy; there is nothing to split.

    Exactness: bitwise against a plain training loop.
    """

    overflowed = False

    def __init__(self, parameters: Iterable[nn.Parameter], split: SplitConfig) -> None:
        self._parameters, self.split = tuple(parameters), split
        self._exchange = False
        self._scale = 1.0
        self._applied = 1.0  # what gradients were multiplied with already

    def begin(self, *, exchange: bool, scale: float, loss_scale: float = 1.0) -> None:
        self._multiply(1 / self._applied)  # autograd adds to these gradients: all need one scale
        self._applied = 1.0
        self._exchange, self._scale = exchange, scale

    def end(self) -> None:
        if self._exchange:
            self._multiply(self._scale)
            self._applied = self._scale

    def updated(self, step: int, *, used: bool = True, late: bool = False) -> None:
        self._applied = 1.0

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)
