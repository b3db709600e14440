"""The engine of a single replica: no other rank holds this model, so its gradients are the average.

Never communicates. Ranks that share one model (tensor or pipeline parallel) and have no data
parallel peers use it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from slipstream.gradients.compressed import NamedState
from slipstream.gradients.layout import Gradient
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.gradients.segments import SegmentStats
from slipstream.strategy import Row, Split
from slipstream.trace.recorder import Stamp


class SingleReplicaEngine:
    """A ``GradientEngine`` that only divides gradients by the loss scale.

    Args:
        parameters: all parameters of the model.
        split: of the strategy; nothing is split.

    Exactness: bitwise against a plain training loop.
    """

    order: ReadyOrder | None = None
    segments: tuple[SegmentStats, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    ready: list[Stamp | None] | None = None
    overflowed = False
    in_flight = False

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

    def abort(self, error: BaseException) -> None: ...

    def updated(self, step: int) -> None:
        self._unscaled = False

    def local_only(self, on: bool) -> None: ...

    def install(self, order: ReadyOrder, split: Split | None = None) -> None: ...

    def codec_state(self) -> NamedState:
        return {}

    def load_codec_state(self, kept: NamedState) -> None: ...

    def close(self) -> None: ...

    def report_rows(self) -> Sequence[Row]:
        return [Row("exchange", "none", "one process holds these parameters: nothing to average")]

    def _multiply(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
