"""The seam between a session and its engine, whether there are other ranks or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from slipstream.checks.sketch import AverageSamples
from slipstream.gradients.compressed import CodecSample, NamedState
from slipstream.gradients.finite import stored
from slipstream.gradients.layout import Gradient
from slipstream.gradients.ready_order import ReadyOrder
from slipstream.gradients.segments import SegmentStats
from slipstream.strategy import Row, SplitConfig
from slipstream.trace.recorder import Stamp


def is_unused(parameter: torch.Tensor) -> bool:
    """Whether its gradient is one of zeros, where a dummy batch has made it."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return not stored(gradient).any()


def drop_unused(parameters: Iterable[torch.Tensor]) -> None:
    """Take away gradients of zero that dummy batches alone have left."""
    for parameter in filter(is_unused, parameters):
        parameter.grad = None


class GradientEngine:
    """Turns gradients of a backward pass into averages over ranks.

    Calls come in this order: ``begin``, the backward pass, ``end`` (or ``abort``), once or several
    times, then ``updated``. Without a backward pass in between, ``end`` exchanges what has
    accumulated. The methods here are those of an engine that exchanges nothing.
    """

    split: SplitConfig
    overflowed: bool
    """Whether the last averages are not finite on some rank, and a codec depends on it; then all
    ranks skip the update."""
    nonfinite: bool
    """Whether the last gradients were infinite or NaN on some rank, where that is looked for."""
    buffers_alike = True
    """Whether buffers are those of the first rank, and no forward of this rank has changed them
    since."""

    # One update.

    def begin(
        self, *, exchange: bool, scale: float, loss_scale: float = 1.0, dummy: bool = False
    ) -> None:
        """Open a backward pass. If ``exchange``, it ends in sums over ranks times ``scale``,
        which contains the inverse of ``loss_scale``. Gradients of zero of a ``dummy`` batch leave
        a parameter unused: an optimizer would decay it."""

    def end(self) -> None:
        """Close the backward pass: ``parameter.grad`` holds the averages."""

    def abort(self, error: BaseException) -> None:
        """Close the backward pass that raised ``error``."""

    def fail(self, error: BaseException) -> None:
        """Refuse to go on: ``error`` broke off what all ranks do together."""

    def updated(self, step: int, *, used: bool = True, late: bool = False) -> None:
        """The gradients are gone, ``used`` or not; ``step`` updates are done. ``late``: a forward
        has begun since."""

    def check_averages(self) -> None:
        """Refuse to update with gradients that must not be changed after backward, but were."""

    def averages(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """The averages that this rank's update will use."""
        return [p.grad for p in parameters if p.grad is not None]

    def nonfinite_here(self) -> tuple[bool, str]:
        """Whether this rank's own gradients were not finite, and the first parameter whose average
        is not, as far as this rank has averages; empty: none."""
        return False, ""

    def sample(self, samples: AverageSamples | None) -> None:
        """Let the next exchanges fill samples, or none."""

    def local_only(self, on: bool) -> None:
        """Whether gradients may come outside of ``begin`` and ``end``; they stay on this rank."""

    # The layout: None or empty until the first exchange.

    @property
    def order(self) -> ReadyOrder | None:
        """The ready order that all ranks agreed on."""
        return None

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """The segments in the order of their exchange."""
        return ()

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """The gradients in ready order."""
        return ()

    @property
    def ready(self) -> list[Stamp | None] | None:
        """When each gradient of the last recorded backward was ready, in ready order."""
        return None

    def install(self, order: ReadyOrder, split: SplitConfig | None = None) -> None:
        """Use this ready order, and from now on this split."""

    # The codecs' state, by parameter.

    def codec_state(self) -> NamedState:
        """State of codecs on this rank."""
        return {}

    def codec_sample(self) -> CodecSample:
        """Some values of it."""
        return {}

    def load_codec_state(self, states: NamedState, /) -> None:
        """Continue from ``codec_state()``."""

    # The handle.

    @property
    def failed(self) -> bool:
        """Whether an exchange was broken off, so that the ranks are out of step."""
        return False

    @property
    def in_flight(self) -> bool:
        """Whether an exchange was started that nobody has waited for."""
        return False

    def close(self) -> None:
        """Remove the hooks."""

    def report_rows(self) -> Sequence[Row]:
        """Report what is exchanged."""
        return [Row("exchange", "none", "one process holds these parameters: nothing to average")]
