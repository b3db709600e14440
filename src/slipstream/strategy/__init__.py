"""The configuration as frozen values: read, written, validated and drawn as a table.

Other rooms read these values and act on them. Nothing here imports torch.
"""

from slipstream.strategy.codec import Adaptive as Adaptive
from slipstream.strategy.codec import ByName as ByName
from slipstream.strategy.codec import Codec as Codec
from slipstream.strategy.codec import Dgc as Dgc
from slipstream.strategy.codec import Half as Half
from slipstream.strategy.codec import Int8 as Int8
from slipstream.strategy.codec import OneBit as OneBit
from slipstream.strategy.codec import PlainCodec as PlainCodec
from slipstream.strategy.codec import PowerSgd as PowerSgd
from slipstream.strategy.codec import Rule as Rule
from slipstream.strategy.codec import codec_of as codec_of
from slipstream.strategy.codec import keeps_state as keeps_state
from slipstream.strategy.memory import Budget as Budget
from slipstream.strategy.memory import BudgetBytes as BudgetBytes
from slipstream.strategy.memory import Checkpoints as Checkpoints
from slipstream.strategy.memory import Every as Every
from slipstream.strategy.memory import Memory as Memory
from slipstream.strategy.memory import Offload as Offload
from slipstream.strategy.memory import Recompute as Recompute
from slipstream.strategy.overview import Row as Row
from slipstream.strategy.overview import overview as overview
from slipstream.strategy.parallel import Parallel as Parallel
from slipstream.strategy.parallel import PipelineParallel as PipelineParallel
from slipstream.strategy.parallel import TensorParallel as TensorParallel
from slipstream.strategy.precision import Autocast as Autocast
from slipstream.strategy.precision import Compute as Compute
from slipstream.strategy.precision import DynamicScale as DynamicScale
from slipstream.strategy.precision import HalfType as HalfType
from slipstream.strategy.precision import HalfWeights as HalfWeights
from slipstream.strategy.precision import LossScale as LossScale
from slipstream.strategy.precision import Precision as Precision
from slipstream.strategy.precision import StaticScale as StaticScale
from slipstream.strategy.presets import Preset as Preset
from slipstream.strategy.presets import presets as presets
from slipstream.strategy.setting import Exactness as Exactness
from slipstream.strategy.setting import Setting as Setting
from slipstream.strategy.setting import Variant as Variant
from slipstream.strategy.spec import Flat as Flat
from slipstream.strategy.spec import Gradients as Gradients
from slipstream.strategy.spec import Strategy as Strategy
from slipstream.strategy.spec import Trace as Trace
from slipstream.strategy.spec import Transport as Transport
from slipstream.strategy.split import ByBytes as ByBytes
from slipstream.strategy.split import ByIndex as ByIndex
from slipstream.strategy.split import ByLayers as ByLayers
from slipstream.strategy.split import ByPercent as ByPercent
from slipstream.strategy.split import Optimal as Optimal
from slipstream.strategy.split import PerGradient as PerGradient
from slipstream.strategy.split import PerLayer as PerLayer
from slipstream.strategy.split import Single as Single
from slipstream.strategy.split import Split as Split
