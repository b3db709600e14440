"""Reduce the memory of activations, and estimate what training needs. Exactness: bitwise.

Three independent techniques: `recompute` runs blocks again in backward instead of keeping their
activations, `offload` moves activations to the host or a disk until backward, `estimate` and
`max_batch` predict memory before training.
"""

from slipstream.memory.estimate.estimate import Estimate, estimate, optimizer_bytes
from slipstream.memory.estimate.max_batch import max_batch
from slipstream.memory.offload.offload import Offloader, check_offload, offload
from slipstream.memory.recompute.recompute import Recomputed, recompute

__all__ = [
    "Estimate",
    "Offloader",
    "Recomputed",
    "check_offload",
    "estimate",
    "max_batch",
    "offload",
    "optimizer_bytes",
    "recompute",
]
