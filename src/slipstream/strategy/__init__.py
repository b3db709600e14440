"""The configuration as frozen values: read, written, validated and drawn as a table.

Other rooms read these values and act on them. Nothing here imports torch.
"""

from slipstream.strategy.codec import (
    Adaptive as Adaptive,
    ByName as ByName,
    Codec as Codec,
    Dgc as Dgc,
    Half as Half,
    Int8 as Int8,
    OneBit as OneBit,
    PlainCodec as PlainCodec,
    PowerSgd as PowerSgd,
    Rule as Rule,
    at_once as at_once,
    codec_of as codec_of,
    keeps_state as keeps_state,
    late_by as late_by,
    phase_of as phase_of,
    phases as phases,
)
from slipstream.strategy.compute import Compute as Compute
from slipstream.strategy.data import (
    Balance as Balance,
    Cache as Cache,
    Data as Data,
    Prefetch as Prefetch,
)
from slipstream.strategy.memory import (
    Budget as Budget,
    BudgetBytes as BudgetBytes,
    Checkpoints as Checkpoints,
    Every as Every,
    Memory as Memory,
    Offload as Offload,
    Recompute as Recompute,
)
from slipstream.strategy.overview import Row as Row, overview as overview
from slipstream.strategy.parallel import (
    Parallel as Parallel,
    PipelineParallel as PipelineParallel,
    TensorParallel as TensorParallel,
)
from slipstream.strategy.precision import (
    Autocast as Autocast,
    DynamicScale as DynamicScale,
    HalfType as HalfType,
    HalfWeights as HalfWeights,
    LossScale as LossScale,
    Precision as Precision,
    StaticScale as StaticScale,
)
from slipstream.strategy.presets import Preset as Preset, presets as presets
from slipstream.strategy.setting import (
    Exactness as Exactness,
    Setting as Setting,
    Variant as Variant,
)
from slipstream.strategy.spec import Gradients as Gradients, Strategy as Strategy, Trace as Trace
from slipstream.strategy.split import (
    ByBytes as ByBytes,
    ByIndex as ByIndex,
    ByLayers as ByLayers,
    ByPercent as ByPercent,
    Optimal as Optimal,
    PerGradient as PerGradient,
    PerLayer as PerLayer,
    Single as Single,
    Split as Split,
)
from slipstream.strategy.transport import (
    Auto as Auto,
    Direct as Direct,
    Flat as Flat,
    Hierarchical as Hierarchical,
    Sharded as Sharded,
    SharedMemory as SharedMemory,
    Transport as Transport,
)
