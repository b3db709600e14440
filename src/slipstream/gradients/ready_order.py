"""The order in which backward produces gradients: observed on each rank, agreed by all.

Parameters that no rank saw come last, in reverse order of registration.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slipstream.transport.consistency import maximum, of_first


@dataclass(frozen=True, slots=True)
class ReadyOrder:
    """The ranks' agreement: the order of the trainable parameters, and two counts for each.

    Attributes:
        order: indices of all parameters, the first to get its gradient first.
        firings: how often each parameter's gradient is accumulated in one backward: once, or, if
            several reentrant checkpoints use it, once for each of them.
        sparse_dims: sparse axes of each gradient; 0 for a dense one.
    """

    order: tuple[int, ...]
    firings: tuple[int, ...]
    sparse_dims: tuple[int, ...]


class Observer:
    """Records which gradients became ready, in which order, in one backward of this rank."""

    def __init__(self, num_parameters: int) -> None:
        self._seen: list[int] = []
        self._sparse_dims = [0] * num_parameters

    def __bool__(self) -> bool:
        """Whether any gradient was seen: not in a pass of a dummy batch."""
        return bool(self._seen)

    def saw(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of parameter ``index`` was accumulated."""
        self._seen.append(index)
        if gradient.is_sparse:
            self._sparse_dims[index] = gradient.sparse_dim()

    def agree(self, group: dist.ProcessGroup, sparse: Collection[int] = ()) -> ReadyOrder:
        """The most firings and axes of any rank, the order of the first: two small collectives.

        A parameter that the first rank did not see comes after those that it saw; one that no rank
        saw has a dense gradient, unless it is among ``sparse``.
        """
        num_parameters = len(self._sparse_dims)
        firings = [0] * num_parameters
        for index in self._seen:
            firings[index] += 1
        counts = torch.tensor([firings, self._sparse_dims], dtype=torch.int64)
        most_firings, sparse_dims = maximum(counts, group).tolist()
        for index in sparse:
            sparse_dims[index] = sparse_dims[index] or int(not most_firings[index])
        order = torch.tensor(_by_last_firing(self._seen, num_parameters), dtype=torch.int64)
        return ReadyOrder(
            tuple(of_first(order, group).tolist()),
            tuple(max(1, n) for n in most_firings),
            tuple(sparse_dims),
        )


def _by_last_firing(seen: Sequence[int], num_parameters: int) -> list[int]:
    """Parameters by their last firing (only then is a gradient whole), then unseen ones."""
    last = {index: position for position, index in enumerate(seen)}
    unseen = [index for index in reversed(range(num_parameters)) if index not in last]
    return sorted(last, key=last.__getitem__) + unseen
