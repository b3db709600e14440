"""The batches of a ``DataLoader``, read ahead across the borders of its epochs."""

from slipstream.data.prefetch.loader import (
    PrefetchLoader as PrefetchLoader,
    is_prefetchable as is_prefetchable,
    prefetch as prefetch,
)
