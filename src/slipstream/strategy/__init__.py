"""The wish as values: what a user asks of slipstream, written, read, checked and drawn.

Never acts: other rooms read these values. Nothing here needs torch.
"""

from slipstream.strategy.overview import Row, overview
from slipstream.strategy.presets import Preset, presets
from slipstream.strategy.setting import Exactness, Setting, Variant
from slipstream.strategy.spec import Flat, Gradients, Strategy, Trace, Transport
from slipstream.strategy.split import (
    ByBytes,
    ByIndex,
    ByLayers,
    ByPercent,
    Optimal,
    PerGradient,
    PerLayer,
    Single,
    Split,
)

__all__ = [
    "ByBytes",
    "ByIndex",
    "ByLayers",
    "ByPercent",
    "Exactness",
    "Flat",
    "Gradients",
    "Optimal",
    "PerGradient",
    "PerLayer",
    "Preset",
    "Row",
    "Setting",
    "Single",
    "Split",
    "Strategy",
    "Trace",
    "Transport",
    "Variant",
    "overview",
    "presets",
]
