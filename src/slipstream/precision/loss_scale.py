"""The loss scale as a state machine: small gradients would be 0 in fp16 without one.

Callers multiply the loss and check gradients; this file only computes the next scale.
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.strategy import DynamicScaleConfig, StaticScaleConfig

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite fp32 number; losses are scaled in fp32."""


class ScaleState(NamedTuple):
    """The scale, and the consecutive updates without (good) and with (bad) overflow since it
    changed."""

    scale: float
    good: int = 0
    bad: int = 0


def next_state(state: ScaleState, config: DynamicScaleConfig, overflowed: bool) -> ScaleState:
    """The state after an update; ``overflowed``: the update was skipped.

    Example:
        >>> config = DynamicScaleConfig(init=4.0, incr_every_n=1)
        >>> next_state(ScaleState(4.0), config, True), next_state(ScaleState(4.0), config, False)
        (ScaleState(scale=2.0, good=0, bad=0), ScaleState(scale=8.0, good=0, bad=0))

    Source: ``update_loss_scaling`` of https://github.com/PaddlePaddle/Paddle; with
    ``decr_every_n`` 1 it equals ``torch.amp.GradScaler``, which has no bounds.
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
    """A loss scale that follows its updates.

    Example:
        >>> scaler = LossScaler(DynamicScaleConfig(init=8.0, incr_every_n=2))
        >>> for overflowed in (False, False, True):
        ...     scaler.update(overflowed)
        >>> scaler.scale, scaler.state
        (8.0, ScaleState(scale=8.0, good=0, bad=0))
    """

    def __init__(self, config: DynamicScaleConfig | StaticScaleConfig) -> None:
        self._config = config
        self.state = ScaleState(
            config.init if isinstance(config, DynamicScaleConfig) else config.scale
        )

    @property
    def scale(self) -> float:
        """Factor for the next loss."""
        return self.state.scale

    def update(self, overflowed: bool) -> None:
        """Record an update; ``overflowed``: it was skipped."""
        if isinstance(self._config, DynamicScaleConfig):
            self.state = next_state(self.state, self._config, overflowed)

    def restore(self, state: ScaleState) -> None:
        """Go on from the state of an earlier run, within the limits of this one; a static scale
        stays."""
        if isinstance(self._config, DynamicScaleConfig):
            scale = min(max(state.scale, self._config.min), self._config.max)
            self.state = state._replace(scale=scale)
