"""Fewer and larger operations: optimizer steps, the layers of a Swin."""

from slipstream.fusion.optimizer import (
    FusedOptimizer as FusedOptimizer,
    fuse_optimizer as fuse_optimizer,
)
from slipstream.fusion.swin import FusedSwin as FusedSwin, fuse_swin as fuse_swin
