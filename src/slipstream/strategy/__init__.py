"""The configuration as frozen values: read, written, validated and drawn as a table.

Other rooms read these values and act on them. Nothing here imports torch.
"""

from slipstream.strategy.checks import ChecksConfig as ChecksConfig
from slipstream.strategy.codec import (
    CodecVariant as CodecVariant,
    DgcConfig as DgcConfig,
    HalfConfig as HalfConfig,
    Int4Config as Int4Config,
    Int8Config as Int8Config,
    OneBitConfig as OneBitConfig,
    PlainCodecConfig as PlainCodecConfig,
    PowerSgdConfig as PowerSgdConfig,
    TopKConfig as TopKConfig,
)
from slipstream.strategy.codec_choice import (
    AdaptiveConfig as AdaptiveConfig,
    ByNameConfig as ByNameConfig,
    CodecConfig as CodecConfig,
    CodecRuleConfig as CodecRuleConfig,
    at_once as at_once,
    codec_of as codec_of,
    keeps_state as keeps_state,
    late_by as late_by,
    phase_of as phase_of,
    takes_momentum as takes_momentum,
)
from slipstream.strategy.compute import ComputeConfig as ComputeConfig
from slipstream.strategy.data import (
    BalanceConfig as BalanceConfig,
    CacheConfig as CacheConfig,
    DataConfig as DataConfig,
    PrefetchConfig as PrefetchConfig,
)
from slipstream.strategy.gradients import GradientsConfig as GradientsConfig
from slipstream.strategy.local import (
    LocalConfig as LocalConfig,
    RendezvousConfig as RendezvousConfig,
)
from slipstream.strategy.memory import (
    BudgetBytesConfig as BudgetBytesConfig,
    BudgetConfig as BudgetConfig,
    CheckpointsConfig as CheckpointsConfig,
    EveryConfig as EveryConfig,
    MemoryConfig as MemoryConfig,
    OffloadConfig as OffloadConfig,
    RecomputeConfig as RecomputeConfig,
)
from slipstream.strategy.overview import Row as Row, overview as overview
from slipstream.strategy.parallel import (
    ParallelConfig as ParallelConfig,
    PipelineParallelConfig as PipelineParallelConfig,
    TensorParallelConfig as TensorParallelConfig,
)
from slipstream.strategy.precision import (
    AutocastConfig as AutocastConfig,
    DynamicScaleConfig as DynamicScaleConfig,
    HalfType as HalfType,
    HalfWeightsConfig as HalfWeightsConfig,
    LossScaleConfig as LossScaleConfig,
    PrecisionConfig as PrecisionConfig,
    StaticScaleConfig as StaticScaleConfig,
)
from slipstream.strategy.presets import Preset as Preset, presets as presets
from slipstream.strategy.setting import (
    Exactness as Exactness,
    Setting as Setting,
    Variant as Variant,
)
from slipstream.strategy.spec import (
    Strategy as Strategy,
    TraceConfig as TraceConfig,
)
from slipstream.strategy.split import (
    ByBytesConfig as ByBytesConfig,
    ByIndexConfig as ByIndexConfig,
    ByLayersConfig as ByLayersConfig,
    ByPercentConfig as ByPercentConfig,
    OptimalConfig as OptimalConfig,
    PerGradientConfig as PerGradientConfig,
    PerLayerConfig as PerLayerConfig,
    SingleConfig as SingleConfig,
    SplitConfig as SplitConfig,
)
from slipstream.strategy.transport import (
    AutoConfig as AutoConfig,
    DirectConfig as DirectConfig,
    FlatConfig as FlatConfig,
    HierarchicalConfig as HierarchicalConfig,
    ShardedConfig as ShardedConfig,
    SharedMemoryConfig as SharedMemoryConfig,
    TransportConfig as TransportConfig,
    TransportVariant as TransportVariant,
)
