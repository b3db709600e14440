"""Fewer and larger operations: optimizer steps, patterns of layers, graphs of a device."""

from slipstream.fusion.optimizer import (
    FusedOptimizer as FusedOptimizer,
    fuse_optimizer as fuse_optimizer,
)
