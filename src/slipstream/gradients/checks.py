"""Refusals of the exchange of gradients, found before anything is installed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from slipstream.errors import StrategyError
from slipstream.gradients.layout import plan_segments
from slipstream.gradients.momentum import check_momentum_correction
from slipstream.gradients.segments import NamedParameter, gradients_of
from slipstream.strategy import (
    ByNameConfig,
    GradientsConfig,
)


def check_gradients(
    trainables: Sequence[NamedParameter], optimizer: torch.optim.Optimizer, config: GradientsConfig
) -> None:
    """Refuse a split or a codec that does not fit these parameters and this optimizer.

    Raises:
        StrategyError: the split does not fit the number of gradients, or the transport not the
            device.
        ModelError: no parameter requires a gradient, or DGC cannot take over this optimizer.
    """
    plan_segments(gradients_of(trainables, [0] * len(trainables)), config.split)
    check_momentum_correction(optimizer, trainables, config.codec)
    device = trainables[0].parameter.device if trainables else torch.device("cpu")
    if config.transport.cpu_only and device.type != "cpu":
        raise StrategyError(
            f"gradients.transport {config.transport.kind} sends the memory of CPUs alone, and the "
            f"model is on {device}; write gradients: {{transport: flat}}"
        )


def gradient_warnings(trainables: Sequence[NamedParameter], config: GradientsConfig) -> list[str]:
    """Rules of codec ``by_name`` that match no parameter: most often a misspelt path."""
    if not isinstance(config.codec, ByNameConfig):
        return []
    names = [t.name for t in trainables]
    known = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [
        f"gradients.codec.rules.{number}.match {rule.match!r} matches no trainable parameter "
        f"({known}); the wildcards are * and ?"
        for number, rule in enumerate(config.codec.rules)
        if not any(fnmatchcase(name, rule.match) for name in names)
    ]
