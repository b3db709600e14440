"""Torch functions that run in another dtype than autocast would choose."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, get_overridable_functions

from slipstream.errors import StrategyError
from slipstream.precision.casts import cast
from slipstream.strategy.validate import did_you_mean


def check_ops(names: Collection[str]) -> None:
    """Refuse names that no torch function has.

    Raises:
        StrategyError: names the nearest function.

    Example:
        >>> check_ops(["gelu", "softmax"])
    """
    if not names:
        return
    functions = chain.from_iterable(get_overridable_functions().values())
    # In-place functions cannot be cast.
    known = {f.__name__ for f in functions if not f.__name__.endswith("_")}
    for name in names:
        if name not in known:
            raise StrategyError(
                f"precision: {name!r} is not a torch function that can be cast"
                f"{did_you_mean(name, known)}; allowed: function names without their module and "
                "without a trailing _, e.g. gelu for torch.nn.functional.gelu"
            )


class OpCasts(TorchFunctionMode):
    """A mode under which, where autocast is on, the named functions run in a given dtype.

    Functions match by name alone: ``softmax`` is ``torch.softmax``, ``torch.nn.functional.softmax``
    and ``Tensor.softmax``. Calls that a Python function makes inside are not matched.

    Args:
        types: dtype by function name.
        device: device type whose autocast must be on.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), OpCasts({"softmax": torch.bfloat16}, "cpu"):
        ...     x.softmax(0).dtype, torch.log_softmax(x, 0).dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, types: dict[str, torch.dtype], device: str) -> None:
        super().__init__()
        self.types, self._device = types, device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = self.types.get(getattr(func, "__name__", ""))
        if dtype is None or "out" in kwargs or not torch.is_autocast_enabled(self._device):
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            return func(*cast(args, dtype), **cast(kwargs, dtype))
