"""Less memory for activations: computed again in backward instead of kept, or away until then; and
what training takes before it runs. Exactness: bitwise.
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
