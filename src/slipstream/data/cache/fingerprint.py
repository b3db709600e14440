"""Fingerprints of datasets: class, length, the indices of parts and a few samples tell one from
another."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Subset

from slipstream.data.pickled import pickled
from slipstream.data.stamp import DEPTH
from slipstream.errors import ModelError

LOOKED_AT = 8
"""Samples that tell a dataset from another one of its class and length."""


def places(size: int) -> list[int]:
    """The samples that are looked at.

    Example:
        >>> places(3), places(24)
        ([0, 1, 2], [0, 3, 6, 9, 12, 15, 18, 21])
    """
    return sorted({size * part // LOOKED_AT for part in range(LOOKED_AT)})


def fingerprint(dataset: Any) -> str:
    """A name for what a dataset gives: its class, its length, a few of its samples, and the
    indices of each ``Subset`` in it: folds of a cross-validation differ in some samples alone.

    Raises:
        ModelError: it gives different samples for the same index, or none.
    """
    size, kind = len(dataset), type(dataset)
    dataset = copy.copy(dataset)  # a file that it opens when first read from is not the workers'
    if not size:
        raise ModelError(f"data.cache: {kind.__qualname__} has no samples")
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} {size}".encode())
    for index in places(size):
        once, again = (pickled(dataset[index]) for _ in range(2))
        if once != again:
            raise ModelError(
                f"data.cache: {kind.__qualname__} gives another sample {index} each time, so it "
                "draws random numbers; keep what it reads with slipstream.data.cache.cached(), and "
                "draw from that"
            )
        digest.update(once)
    for indices in _parts(dataset, DEPTH):
        digest.update(indices.encode())
    return f"{kind.__qualname__}-{digest.hexdigest()[:16]}"


def _parts(dataset: Any, depth: int) -> Iterator[str]:
    """The indices of parts, of a dataset and of those in it."""
    if isinstance(dataset, Subset):
        indices: Any = dataset.indices
        yield " ".join(map(str, indices.tolist() if hasattr(indices, "tolist") else indices))
    for inner in getattr(dataset, "__dict__", {}).values() if depth else ():
        several = isinstance(inner, list | tuple) and inner and isinstance(inner[0], Dataset)
        for one in inner if several else [inner]:  # several: ConcatDataset
            if isinstance(one, Dataset):
                yield from _parts(one, depth - 1)
