"""The engine of ranks that train on their own, once they have warmed up together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from slipstream.checks.sketch import AverageSamples
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.layout import Gradient
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.gradients.segments import SegmentStats
from slipstream.local.island import Island
from slipstream.strategy import Row, SplitConfig
from slipstream.trace.recorder import Stamp


class LocalEngine(GradientEngine):
    """An engine over all ranks until `leave` is called, and over an island from then on.

    Args:
        shared: averages over all ranks; None: there is no warm-up.
        own: averages over the island, or scales the gradients of this rank; owners close both.
        island: of this rank.

    Exactness: that of the engine in use.
    """

    def __init__(self, shared: GradientEngine | None, own: GradientEngine, island: Island) -> None:
        self._shared, self._own, self.island = shared, own, island
        self._used: GradientEngine = own if shared is None else shared
        self._gathers = False  # inside no_sync()
        self.local_only(False)

    @property
    def alone(self) -> bool:
        """Whether gradients stay in the island."""
        return self._used is self._own

    def leave(self, alone: bool) -> None:
        """Keep gradients in the island from now on, or average over all ranks again; between two
        updates."""
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

    @property
    def nonfinite(self) -> bool:  # type: ignore[override]
        """Whether the last gradients were not finite on some rank that they were averaged over."""
        return self._used.nonfinite

    @property
    def buffers_alike(self) -> bool:  # type: ignore[override]
        """Whether buffers are those of the first rank, unchanged since."""
        return self._used.buffers_alike

    def nonfinite_here(self) -> tuple[bool, str]:
        return self._used.nonfinite_here()

    def begin(
        self, *, exchange: bool, scale: float, loss_scale: float = 1.0, dummy: bool = False
    ) -> None:
        self._used.begin(exchange=exchange, scale=scale, loss_scale=loss_scale, dummy=dummy)

    def end(self) -> None:
        self._used.end()

    def abort(self, error: BaseException) -> None:
        self._used.abort(error)

    def fail(self, error: BaseException) -> None:
        self._used.fail(error)

    def updated(self, step: int, *, used: bool = True, late: bool = False) -> None:
        self._used.updated(step, used=used, late=late)

    def check_averages(self) -> None:
        self._used.check_averages()

    def averages(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        return self._used.averages(parameters)

    def sample(self, samples: AverageSamples | None) -> None:
        for engine in self._engines:
            engine.sample(samples if engine is self._used else None)

    def local_only(self, on: bool) -> None:
        self._gathers = on
        for engine in self._engines:  # the hooks of both are there to the end
            engine.local_only(on or engine is not self._used)

    @property
    def _engines(self) -> Sequence[GradientEngine]:
        return [self._own] if self._shared is None else [self._shared, self._own]

    @property
    def order(self) -> ReadyOrder | None:
        return next((engine.order for engine in self._engines if engine.order is not None), None)

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        return self._used.segments

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        return self._used.gradients or self._engines[0].gradients

    @property
    def ready(self) -> list[Stamp | None] | None:
        return self._used.ready

    def install(self, order: ReadyOrder, split: SplitConfig | None = None) -> None:
        for engine in self._engines:
            engine.install(order, split)

    @property
    def failed(self) -> bool:
        return any(engine.failed for engine in self._engines)

    @property
    def in_flight(self) -> bool:
        return any(engine.in_flight for engine in self._engines)

    def report_rows(self) -> Sequence[Row]:
        return []  # both have their own
