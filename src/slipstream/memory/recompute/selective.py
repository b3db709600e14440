"""Keep the results of chosen operations inside of regions that are recomputed.

Built on torch's selective activation checkpointing, which stores the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from slipstream.errors import UsageError
from slipstream.pytree import tensors
from slipstream.strategy.memory import KeptOperation

_aten = torch.ops.aten

_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_OPERATIONS: dict[Any, KeptOperation] = {_aten.convolution.default: "convolution"}
_OPERATIONS |= dict.fromkeys(_PRODUCTS, "matmul")

_DROPOUT_ARGUMENT = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Fused attention, and the position of its argument ``dropout_p``."""

_ADVICE = {
    "has been mutated": "a kept result was changed in place after the operation, as "
    "nn.ReLU(inplace=True) does; use the out-of-place form, or remove that operation from keep",
    "backward an extra time": "a graph with kept results supports one backward; remove keep, or "
    "compute the loss again",
}
"""The fix for errors of torch, by words in their message."""


def contexts(
    keep: Sequence[KeptOperation],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first run of a region and of its recomputation, which reuses the results of
    the operations in ``keep``; see ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Fused attention with dropout is recomputed all the same: if it were skipped, its random numbers
    would not be drawn, and later operations would draw different ones than in the first run.

    Raises:
        UsageError: a kept result was changed in place, in the first run or in recomputation; or,
            in recomputation, the graph goes through backward a second time.
    """

    # The memory of kept results, and of those seen through `_unsafe_view`, as matmul returns them:
    # torch counts no writes through that.
    kept: set[int] = set()
    uncounted: set[int] = set()

    def policy(
        context: SelectiveCheckpointContext, function: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if not context.is_recompute:
            if function is _aten._unsafe_view.default and _memory(args[0]) in kept:
                uncounted.add(_memory(args[0]))
            if any(_memory(written) in uncounted for written in _written(function, args, kwargs)):
                raise UsageError(f"memory.recompute keep: {_ADVICE['has been mutated']}")
        if _operation(function, args, kwargs) in keep:
            kept.update(_memory(t) for t in tensors(context.op_output) if t.layout is torch.strided)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, recomputation = create_selective_checkpoint_contexts(policy)
    return first, _WithAdvice(recomputation)


class WatchOperations(TorchDispatchMode):
    """A context that calls ``see`` with the result of each operation that `contexts` could keep.

    Example:
        >>> seen = []
        >>> with WatchOperations(lambda operation, result: seen.append(operation)):
        ...     y = (torch.eye(2) @ torch.eye(2)).exp()
        >>> seen
        ['matmul']
    """

    def __init__(self, see: Callable[[KeptOperation, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = _operation(func, args, kwargs)
        if operation is not None:
            self._see(operation, result)
        return result


def _operation(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> KeptOperation | None:
    """The name of an operation in a strategy; None if it cannot be kept."""
    position = _DROPOUT_ARGUMENT.get(function)
    if position is None:
        return _OPERATIONS.get(function)
    dropout = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
    return None if dropout else "attention"


def _written(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors among its arguments that an operation writes into."""
    schema = getattr(function, "_schema", None)  # operators of higher order have none
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (t for t in tensors(given) if t.layout is torch.strided)


def _memory(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


class _WithAdvice:
    """Wraps a context so that torch's errors say what to do; reusable, as the context is."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, error, trace)
        for words, advice in _ADVICE.items():
            if isinstance(error, RuntimeError) and words in str(error):
                raise UsageError(f"memory.recompute keep: {advice}") from error
