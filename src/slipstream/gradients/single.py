"""The engine of a single replica: no other rank holds this model, so its gradients are the average.

Never communicates. Ranks that share one model (tensor or pipeline parallel) and have no data
parallel peers use it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from slipstream.gradients.finite import all_finite, first_nonfinite
from slipstream.gradients.interface import GradientEngine, drop_unused
from slipstream.gradients.messages import unfrozen
from slipstream.gradients.segments import NamedParameter
from slipstream.strategy import SplitConfig


class SingleReplicaEngine(GradientEngine):
    """An engine that exchanges nothing, and scales gradients to the mean of their window.

    Args:
        parameters: all parameters of the model.
        split: of the strategy; there is nothing to split.
        looks: whether gradients that are not finite are looked for.
        any_rank: whether a flag is up on any rank that shares this model.
        frozen: parameters that must stay frozen, as their gradients are not those of this rank
            alone: `begin` raises UsageError where one requires a gradient.

    Exactness: bitwise against a plain training loop.
    """

    overflowed = nonfinite = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        split: SplitConfig,
        *,
        looks: bool = False,
        any_rank: Callable[[bool], bool] = bool,
        frozen: Sequence[NamedParameter] = (),
    ) -> None:
        self._names, self._parameters = tuple(parameters), tuple(parameters.values())
        self.split, self._looks, self._any_rank = split, looks, any_rank
        self._frozen = frozen
        self._exchange = False
        self._scale = self._loss_scale = 1.0
        self._applied = 1.0  # what gradients were multiplied with already
        self._unused: list[nn.Parameter] = []  # but by dummy batches, in this window

    def begin(
        self, *, exchange: bool, scale: float, loss_scale: float = 1.0, dummy: bool = False
    ) -> None:
        thawed = [t.name for t in self._frozen if t.parameter.requires_grad]
        if thawed:
            raise unfrozen(thawed)
        self._multiply(1 / self._applied)  # autograd adds to these gradients: all need one scale
        self._applied = 1.0
        self._exchange, self._scale, self._loss_scale = exchange, scale, loss_scale
        self.nonfinite = False
        if exchange or not dummy:
            self._drop_unused()
        if dummy:
            self._unused += [p for p in self._parameters if p.grad is None]

    def end(self) -> None:
        if self._exchange:
            self._drop_unused()
            self._multiply(self._scale)
            self._applied = self._scale
            if self._looks and self._loss_scale == 1.0:
                self.nonfinite = self._any_rank(not all_finite(self.averages(self._parameters)))

    def nonfinite_here(self) -> tuple[bool, str]:
        gradients = (parameter.grad for parameter in self._parameters)
        name = first_nonfinite(zip(self._names, gradients, strict=True))
        return bool(name), name

    def _drop_unused(self) -> None:
        drop_unused(self._unused)
        self._unused.clear()

    def updated(self, step: int, *, used: bool = True, late: bool = False) -> None:
        self._applied = 1.0
        self._unused.clear()

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)
