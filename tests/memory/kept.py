"""What a forward keeps with recomputation, by the counts of the estimate."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.memory.estimate.saved_storages import SavedStorages
from slipstream.strategy.memory import KeptOperation


def kept_bytes(
    saved: SavedStorages, regions: Sequence[Sequence[str]], keep: Sequence[KeptOperation] = ()
) -> int:
    """Bytes kept from forward to backward: of regions the inputs, and the results of ``keep``."""
    recomputed = {path for region in regions for path in region}
    kept = set(saved.elsewhere)
    kept.update(*(saved.blocks[path] for path in saved.blocks if path not in recomputed))
    kept.update(*(saved.inputs[region[0]] for region in regions))
    for path in recomputed:
        kept.update(*(saved.results[path].get(operation, ()) for operation in keep))
    return sum(saved.sizes[storage] for storage in kept)
