"""Faster computing: compiled blocks, fused chains, optimizers and Swins, graphs."""

from slipstream.fusion.channels_last import ChannelsLast as ChannelsLast
from slipstream.fusion.compiled_blocks import (
    CompiledBlocks as CompiledBlocks,
    compile_blocks as compile_blocks,
)
from slipstream.fusion.graphs import GraphedBlocks as GraphedBlocks, graph_blocks as graph_blocks
from slipstream.fusion.optimizer import (
    FusedOptimizer as FusedOptimizer,
    fuse_optimizer as fuse_optimizer,
)
from slipstream.fusion.patterns import (
    FusedPatterns as FusedPatterns,
    fuse_patterns as fuse_patterns,
)
from slipstream.fusion.swin import FusedSwin as FusedSwin, fuse_swin as fuse_swin
