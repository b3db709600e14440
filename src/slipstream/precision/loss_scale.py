"""By what a loss is multiplied, so that small gradients survive in fp16: a state machine.

Never touches a loss or a gradient, and never asks whether a gradient is finite.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.strategy import DynamicScale, StaticScale

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite number in fp32, in which losses are multiplied."""


class ScaleState(NamedTuple):
    """The present scale, and how many updates in a row went well, or badly, since it changed."""

    scale: float
    good: int = 0
    bad: int = 0


def next_state(state: ScaleState, config: DynamicScale, overflowed: bool) -> ScaleState:
    """The state after an update, which happened, or was skipped where gradients ``overflowed``.

    Example:
        >>> wish = DynamicScale(init=4.0, incr_every_n=1)
        >>> next_state(ScaleState(4.0), wish, True), next_state(ScaleState(4.0), wish, False)
        (ScaleState(scale=2.0, good=0, bad=0), ScaleState(scale=8.0, good=0, bad=0))

    Source: ``update_loss_scaling`` of https://github.com/PaddlePaddle/Paddle; with
    ``decr_every_n`` 1 it is ``torch.amp.GradScaler``, which knows no bounds.
    """
    scale, good, bad = state
    if overflowed:
        if bad + 1 < config.decr_every_n:
            return ScaleState(scale, 0, bad + 1)
        return ScaleState(max(scale * config.decr_ratio, config.min))
    if good + 1 < config.incr_every_n:
        return ScaleState(scale, good + 1, 0)
    grown = min(scale * config.incr_ratio, config.max)
    return ScaleState(grown if grown <= LARGEST else scale)


class LossScaler:
    """A loss scale and its state, update by update.

    Example:
        >>> scaler = LossScaler(DynamicScale(init=8.0, incr_every_n=2))
        >>> for overflowed in (False, False, True):
        ...     scaler.update(overflowed)
        >>> scaler.scale, scaler.state
        (8.0, ScaleState(scale=8.0, good=0, bad=0))
    """

    def __init__(self, config: DynamicScale | StaticScale) -> None:
        self._config = config
        self.state = ScaleState(config.init if isinstance(config, DynamicScale) else config.scale)

    @property
    def scale(self) -> float:
        """What to multiply the next loss by."""
        return self.state.scale

    def update(self, overflowed: bool) -> None:
        """An update is over; it was skipped where gradients ``overflowed``."""
        if isinstance(self._config, DynamicScale):
            self.state = next_state(self.state, self._config, overflowed)
