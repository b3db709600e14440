"""Less memory for activations: computed again in backward instead of kept. Exactness: bitwise."""

from slipstream.memory.recompute import Recomputed, recompute

__all__ = ["Recomputed", "recompute"]
