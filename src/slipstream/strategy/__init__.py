"""The configuration as frozen values: read, written, validated and drawn as a table.

Other rooms read these values and act on them. Nothing here imports torch.
"""

from slipstream.strategy.codec import (
    Adaptive,
    ByName,
    Codec,
    Dgc,
    Half,
    Int8,
    OneBit,
    PlainCodec,
    PowerSgd,
    Rule,
    codec_of,
    keeps_state,
)
from slipstream.strategy.memory import (
    Budget,
    BudgetBytes,
    Checkpoints,
    Every,
    Memory,
    Offload,
    Recompute,
)
from slipstream.strategy.overview import Row, overview
from slipstream.strategy.parallel import Parallel, PipelineParallel, TensorParallel
from slipstream.strategy.precision import (
    Autocast,
    Compute,
    DynamicScale,
    HalfType,
    HalfWeights,
    LossScale,
    Precision,
    StaticScale,
)
from slipstream.strategy.presets import Preset, presets
from slipstream.strategy.setting import Exactness, Setting, Variant
from slipstream.strategy.spec import Gradients, Strategy, Trace
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
from slipstream.strategy.transport import Direct, Flat, Transport

__all__ = [
    "Adaptive",
    "Autocast",
    "Budget",
    "BudgetBytes",
    "ByBytes",
    "ByIndex",
    "ByLayers",
    "ByName",
    "ByPercent",
    "Checkpoints",
    "Codec",
    "Compute",
    "Dgc",
    "Direct",
    "DynamicScale",
    "Every",
    "Exactness",
    "Flat",
    "Gradients",
    "Half",
    "HalfType",
    "HalfWeights",
    "Int8",
    "LossScale",
    "Memory",
    "Offload",
    "OneBit",
    "Optimal",
    "Parallel",
    "PerGradient",
    "PerLayer",
    "PipelineParallel",
    "PlainCodec",
    "PowerSgd",
    "Precision",
    "Preset",
    "Recompute",
    "Row",
    "Rule",
    "Setting",
    "Single",
    "Split",
    "StaticScale",
    "Strategy",
    "TensorParallel",
    "Trace",
    "Transport",
    "Variant",
    "codec_of",
    "keeps_state",
    "overview",
    "presets",
]
