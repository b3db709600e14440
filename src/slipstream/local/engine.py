"""The engine of ranks that train on their own, once they have warmed up together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from slipstream.gradients.compressed import NamedState
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.layout import Gradient
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.gradients.segments import SegmentStats
from slipstream.gradients.single import SingleReplicaEngine
from slipstream.strategy import Row, SplitConfig
from slipstream.trace.recorder import Stamp


class LocalEngine(GradientEngine):
    """An engine over ranks until `leave` is called, and one of a single replica from then on.

    Args:
        shared: averages over ranks, closed by its owner; None: there is no warm-up.
        own: scales the gradients of this rank.

    Exactness: that of the engine in use.
    """

    def __init__(self, shared: GradientEngine | None, own: SingleReplicaEngine) -> None:
        self._shared, self._own = shared, own
        self._used: GradientEngine = own if shared is None else shared
        self._gathers = False  # inside no_sync()

    @property
    def alone(self) -> bool:
        """Whether gradients stay on this rank."""
        return self._used is self._own

    def leave(self, alone: bool) -> None:
        """Keep gradients on this rank from now on, or average them again; between two updates."""
        if self._shared is not None:
            self._used = self._own if alone else self._shared
            self.local_only(self._gathers)

    @property
    def split(self) -> SplitConfig:  # type: ignore[override]
        """The strategy's split."""
        return self._own.split

    @property
    def overflowed(self) -> bool:  # type: ignore[override]
        """Whether the last averages are not finite on some rank."""
        return self._used.overflowed

    def begin(self, *, exchange: bool, scale: float, loss_scale: float = 1.0) -> None:
        self._used.begin(exchange=exchange, scale=scale, loss_scale=loss_scale)

    def end(self) -> None:
        self._used.end()

    def abort(self, error: BaseException) -> None:
        self._used.abort(error)

    def updated(self, step: int, *, used: bool = True, late: bool = False) -> None:
        self._used.updated(step, used=used, late=late)

    def check_averages(self, *, by_hand: bool = False) -> None:
        self._used.check_averages(by_hand=by_hand)

    def averages(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        return self._used.averages(parameters)

    def local_only(self, on: bool) -> None:
        self._gathers = on
        if self._shared is not None:  # its hooks are there to the end
            self._shared.local_only(on or self.alone)

    @property
    def order(self) -> ReadyOrder | None:
        return None if self._shared is None else self._shared.order

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        return self._used.segments

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        return () if self._shared is None else self._shared.gradients

    @property
    def ready(self) -> list[Stamp | None] | None:
        return self._used.ready

    def install(self, order: ReadyOrder, split: SplitConfig | None = None) -> None:
        if self._shared is not None:
            self._shared.install(order, split)

    def codec_state(self) -> NamedState:
        return {} if self._shared is None else self._shared.codec_state()

    def load_codec_state(self, states: NamedState, /) -> None:
        if self._shared is not None:
            self._shared.load_codec_state(states)

    @property
    def failed(self) -> bool:
        return self._used.failed

    @property
    def in_flight(self) -> bool:
        return self._used.in_flight

    def report_rows(self) -> Sequence[Row]:
        return []  # those of the engine that is shared are its own
