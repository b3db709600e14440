"""Fewer and larger operations: chains of a model's, optimizer steps, the layers of a Swin."""

from slipstream.fusion.optimizer import (
    FusedOptimizer as FusedOptimizer,
    fuse_optimizer as fuse_optimizer,
)
from slipstream.fusion.patterns import (
    FusedPatterns as FusedPatterns,
    fuse_patterns as fuse_patterns,
)
from slipstream.fusion.swin import FusedSwin as FusedSwin, fuse_swin as fuse_swin
