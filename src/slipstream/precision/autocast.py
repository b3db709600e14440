"""``autocast``: run a model's forward under ``torch.autocast``; weights stay fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from slipstream.precision.casts import HALF_TYPES, cast
from slipstream.precision.float_modules import Modules, WrappedForward, modules_in_float
from slipstream.precision.op_casts import OpCasts, check_ops
from slipstream.strategy import HalfType


class Autocast:
    """A model under autocast; made by `autocast`.

    Attributes:
        floats: the modules that stay fp32, by path.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, ops: dict[str, torch.dtype], floats: Modules
    ) -> None:
        self._model, self._device = model, _device_type(model)
        self._dtype, self.floats = dtype, floats
        self._ops = OpCasts(ops, self._device) if ops else None
        # Every module installs the op casts: a checkpoint that recomputes a block in backward
        # restores autocast, but not what wraps the whole model.
        inner = [m for m in model.modules() if m is not model] if ops else []
        self._forwards = [WrappedForward(module, self._with_ops) for module in inner]
        self._forwards += [WrappedForward(module, self._in_float) for module in floats.values()]
        self._forwards.append(WrappedForward(model, self._in_half))

    def _in_half(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        device = _device_type(self._model)
        if device not in (self._device, "meta"):  # moved since; on meta nothing is cast
            self._device = device
            if self._ops is not None:
                self._ops = OpCasts(self._ops.types, device)
        with torch.autocast(self._device, self._dtype):
            return cast(self._with_ops(forward, args, kwargs), torch.float32)

    def _in_float(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch.autocast(self._device, enabled=False):
            return forward(*cast(args, torch.float32), **cast(kwargs, torch.float32))

    def _with_ops(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        ops, self._ops = self._ops, None  # inside, they are active already
        try:
            with ops or nullcontext():
                return forward(*args, **kwargs)
        finally:
            self._ops = ops

    def close(self) -> None:
        """Restore the model's own forward; idempotent."""
        while self._forwards:
            self._forwards.pop().remove()


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def autocast(
    model: nn.Module,
    dtype: HalfType = "bf16",
    *,
    float_ops: Sequence[str] = (),
    half_ops: Sequence[str] = (),
    float_modules: Sequence[str] = (),
) -> Autocast:
    """Run the forward of ``model`` under ``torch.autocast`` and return its outputs in fp32.

    A loss computed from the outputs is therefore computed in fp32, as torch's autocast does for
    torch's losses. Weights, gradients and the optimizer stay fp32. With fp16, scale the loss, e.g.
    by ``torch.amp.GradScaler`` or by a session's loss scale.

    Args:
        model: any module, which may be moved to another device later; ``close()`` restores its
            forward.
        dtype: of matrix products and convolutions.
        float_ops: torch functions that run in fp32, besides autocast's own.
        half_ops: torch functions that run in ``dtype``, besides autocast's own.
        float_modules: patterns of module paths that run in fp32; their outputs stay fp32, as do
            those of autocast's fp32 functions.

    Exactness: lossy.

    Raises:
        StrategyError: a pattern or a name matches nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model[0].register_forward_hook(lambda module, x, y: print(y.dtype)) and None
        >>> cast = autocast(model, "bf16")
        >>> model(torch.ones(1, 2)).dtype
        torch.bfloat16
        torch.float32
        >>> cast.close()

    Source: opt level O1 of https://github.com/NVIDIA/apex, on torch's autocast.
    """
    check_ops([*float_ops, *half_ops])
    half = HALF_TYPES[dtype]
    ops = dict.fromkeys(float_ops, torch.float32) | dict.fromkeys(half_ops, half)
    floats = modules_in_float(model, float_modules, normalisation=False)
    return Autocast(model, half, ops, floats)
