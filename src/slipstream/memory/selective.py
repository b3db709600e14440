"""Operations whose results are kept inside a region that is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from slipstream.strategy.memory import Operation

_aten = torch.ops.aten

_OPERATIONS: dict[Operation, set[Any]] = {
    "matmul": {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
    },
    "convolution": {_aten.convolution.default},
}

_DROPOUT_OF = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Fused attention, and which of its arguments is the rate of its dropout."""


def contexts(
    keep: Sequence[Operation],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first run of a region and of its repetition, in which the results of ``keep``
    are not computed again; see ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Fused attention that drops values is computed again all the same: left out, it would not draw
    its random numbers, and what comes after it would draw others than the first time.
    """
    kept = {operation for name in keep for operation in _OPERATIONS.get(name, ())}

    def policy(
        _: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if operation in kept or ("attention" in keep and _is_plain(operation, args, kwargs)):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, again


def _is_plain(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is fused attention without dropout."""
    place = _DROPOUT_OF.get(operation)
    if place is None:
        return False
    return not kwargs.get("dropout_p", args[place] if len(args) > place else 0.0)
