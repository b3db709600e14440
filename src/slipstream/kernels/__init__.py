"""Operations that models call often and compute slowly, each fused or batched, one a file.

Each file has a plain ``reference`` beside the fast path. They are called by a model's own code.
"""

from slipstream.kernels.add_act import add_act as add_act
from slipstream.kernels.batch_norm_act import (
    BatchNormed as BatchNormed,
    batch_norm_act as batch_norm_act,
)
from slipstream.kernels.compress_by_index import compress_by_index as compress_by_index
from slipstream.kernels.relu_depthwise import relu_depthwise as relu_depthwise
from slipstream.kernels.sim_ota import (
    Assignment as Assignment,
    Level as Level,
    Objects as Objects,
    sim_ota as sim_ota,
)
from slipstream.kernels.window_attention import window_attention as window_attention
from slipstream.kernels.window_partition import (
    window_merge as window_merge,
    window_partition as window_partition,
)
