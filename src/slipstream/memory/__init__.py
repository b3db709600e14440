"""Reduce the memory of activations, and estimate what training needs. Exactness: bitwise.

Three independent techniques: `recompute` runs blocks again in backward instead of keeping their
activations, `offload` moves activations to the host or a disk until backward, `estimate` and
`max_batch` predict memory before training.
"""

from slipstream.memory.estimate.estimate import (
    Estimate as Estimate,
    estimate as estimate,
    optimizer_bytes as optimizer_bytes,
)
from slipstream.memory.estimate.max_batch import max_batch as max_batch
from slipstream.memory.offload.offload import (
    Offloader as Offloader,
    check_offload as check_offload,
    offload as offload,
)
from slipstream.memory.recompute.recompute import Recomputed as Recomputed, recompute as recompute
