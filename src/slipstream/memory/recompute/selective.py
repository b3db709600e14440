"""Operations whose results are kept inside a region that is computed again.

Never keeps anything itself: torch's selective checkpoint does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from slipstream.errors import UsageError
from slipstream.strategy.memory import Operation

_aten = torch.ops.aten

_OPERATIONS: dict[Any, Operation] = {
    _aten.mm.default: "matmul",
    _aten.addmm.default: "matmul",
    _aten.bmm.default: "matmul",
    _aten.baddbmm.default: "matmul",
    _aten.convolution.default: "convolution",
}

_DROPOUT_OF = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Fused attention, and which of its arguments is the rate of its dropout."""

_ADVICE = {
    "has been mutated": "a result that is kept was changed in place behind the operation, as "
    "nn.ReLU(inplace=True) does; let it make a new tensor, or leave that operation out of keep",
    "backward an extra time": "a graph whose results are kept goes backward once; leave keep out, "
    "or make the loss again",
}
"""What to do about torch's errors, by words in them."""


def contexts(
    keep: Sequence[Operation],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first run of a region and of its repetition, in which the results of ``keep``
    are not computed again; see ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Fused attention that drops values is computed again all the same: left out, it would not draw
    its random numbers, and what comes after it would draw others than the first time.

    Raises:
        UsageError: in the repetition: a result that is kept was changed in place, or is asked for
            a second time.
    """

    def policy(
        _: SelectiveCheckpointContext, function: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if _operation(function, args, kwargs) in keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, _Explained(again)


def watched(see: Callable[[Operation, Any], None]) -> AbstractContextManager[Any]:
    """A context that shows ``see`` the results of all operations that could be kept; keeps none.

    Example:
        >>> seen = []
        >>> with watched(lambda operation, result: seen.append(operation)):
        ...     y = (torch.eye(2) @ torch.eye(2)).exp()
        >>> seen
        ['matmul']
    """

    def policy(
        context: SelectiveCheckpointContext, function: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        operation = _operation(function, args, kwargs)
        if operation is not None:
            see(operation, context.op_output)
        return CheckpointPolicy.PREFER_RECOMPUTE

    first: AbstractContextManager[Any] = create_selective_checkpoint_contexts(policy)[0]
    return first


def _operation(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
    """What it is called in a strategy; None: what cannot be kept."""
    place = _DROPOUT_OF.get(function)
    if place is None:
        return _OPERATIONS.get(function)
    dropout = kwargs.get("dropout_p", args[place] if len(args) > place else 0.0)
    return None if dropout else "attention"


class _Explained:
    """A context whose errors say what to do; it may be entered several times."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, error, trace)
        for words, advice in _ADVICE.items():
            if isinstance(error, RuntimeError) and words in str(error):
                raise UsageError(f"memory.recompute keep: {advice}") from error
