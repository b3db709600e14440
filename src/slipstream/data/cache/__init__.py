"""Samples of a dataset that are kept across epochs and ranks."""

from slipstream.data.cache.dataset import (
    CachedDataset as CachedDataset,
    cached as cached,
    cached_loader as cached_loader,
)
