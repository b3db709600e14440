"""Splits one batch into equal micro-batches, for models with any arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import StrategyError
from slipstream.pytree import mapped, tensors


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward of the whole model, and the target of its loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    def signature(self) -> str:
        """Shapes and dtypes of all tensors; stages are set up for one signature."""
        values = tensors([self.args, self.kwargs, self.target])
        return " ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in values)


def micro_batches(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, count: int
) -> list[MicroBatch]:
    """Split every tensor whose first dimension is the batch; pass all else to each micro-batch.

    The first dimension of the first tensor is the batch size; a tensor with another first
    dimension, e.g. a mask of positions, is not split. Exactness: views of the batch.

    Raises:
        StrategyError: ``args`` is not a tuple, there is no tensor, or ``count`` does not divide the
            batch.

    Example:
        >>> import torch
        >>> parts = micro_batches((torch.arange(4),), {"flag": True}, None, 2)
        >>> [part.args for part in parts]
        [(tensor([0, 1]),), (tensor([2, 3]),)]
    """
    if not isinstance(args, tuple):
        raise StrategyError(f"args is a {type(args).__name__}; allowed: a tuple, e.g. (x,)")
    batched = [x for x in tensors([*args, *kwargs.values(), target]) if x.ndim]
    if not batched:
        raise StrategyError(
            "a batch without a tensor; allowed: one whose first tensor has the samples along its "
            "first dimension"
        )
    size = len(batched[0])
    if size == 0 or size % count:
        raise StrategyError(
            f"a batch of {size} samples in {count} micro-batches; allowed: a multiple of {count}, "
            "since the mean of the micro-batches' losses is that of the batch only if they are "
            "equal"
        )

    def part(number: int) -> MicroBatch:
        def piece(x: torch.Tensor) -> torch.Tensor:
            return x.chunk(count)[number] if x.ndim and len(x) == size else x

        return MicroBatch(*mapped((args, kwargs, target), piece))

    return [part(number) for number in range(count)]
