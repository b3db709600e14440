"""Splits one batch into equal micro-batches, whatever the model's arguments look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import StrategyError
from slipstream.pytree import mapped, tensors


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward of the whole model, and what its loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    def signature(self) -> str:
        """Shapes and dtypes of all tensors: what stages are set up for."""
        values = [*tensors(self.args), *tensors(self.kwargs), *tensors(self.target)]
        return " ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in values)


def micro_batches(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, count: int
) -> list[MicroBatch]:
    """Split every tensor whose first dimension is the batch; all else is the same in each.

    The batch is the first dimension of the first tensor; a tensor of another first dimension, e.g.
    a mask of positions, is given whole. Exactness: views of the batch.

    Raises:
        StrategyError: ``args`` is no tuple, there is no tensor, or a batch that ``count`` does not
            divide.

    Example:
        >>> parts = micro_batches((torch.arange(4),), {"flag": True}, None, 2)
        >>> [part.args for part in parts]
        [(tensor([0, 1]),), (tensor([2, 3]),)]
    """
    if not isinstance(args, tuple):
        raise StrategyError(f"args is a {type(args).__name__}; allowed: a tuple, e.g. (x,)")
    given = [x for x in tensors([*args, *kwargs.values(), target]) if x.ndim]
    if not given:
        raise StrategyError("a batch without a tensor; allowed: one whose first dimension counts")
    size = len(given[0])
    if size == 0 or size % count:
        raise StrategyError(
            f"a batch of {size} samples in {count} micro-batches; allowed: a multiple of {count}, "
            "since the mean of the micro-batches' losses is that of the batch only if they are "
            "equal"
        )

    def part(value: Any, number: int) -> Any:
        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.chunk(count)[number] if x.ndim and len(x) == size else x

        return mapped(value, cut)

    return [
        MicroBatch(part(args, number), part(kwargs, number), part(target, number))
        for number in range(count)
    ]
