"""Classes of ``DataLoader`` that iterate in a way of their own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Whether its class may yield something else than the batches of its samplers.

    Example:
        >>> class Halves(DataLoader):
        ...     def __iter__(self):
        ...         return (batch / 2 for batch in super().__iter__())
        >>> iterates_itself(DataLoader([1, 2])), iterates_itself(Halves([1, 2]))
        (False, True)
    """
    kind = type(loader)
    return (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    )
