"""Functions of torch that compute in another type than autocast would choose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, get_overridable_functions

from slipstream.errors import StrategyError
from slipstream.precision.casts import cast
from slipstream.strategy.validate import did_you_mean


def check_ops(names: Collection[str]) -> None:
    """Refuse what no function of torch is called.

    Raises:
        StrategyError: names the nearest one.

    Example:
        >>> check_ops(["gelu", "softmax"])
    """
    if not names:
        return
    every = {f.__name__ for functions in get_overridable_functions().values() for f in functions}
    known = {name for name in every if not name.endswith("_")}  # those change their argument
    for name in names:
        if name not in known:
            raise StrategyError(
                f"precision: {name!r} is no function of torch that can be cast"
                f"{did_you_mean(name, known)}; allowed: names without a module, e.g. gelu for "
                "torch.nn.functional.gelu, that do not end in _"
            )


class OpCasts(TorchFunctionMode):
    """Inside, and where autocast is on, functions compute in the type that is named for them.

    A function is known by its name alone: ``softmax`` is ``torch.softmax``,
    ``torch.nn.functional.softmax`` and ``Tensor.softmax``. What a function of Python calls inside
    is not seen.

    Args:
        types: by name of the function.
        device: whose autocast is asked.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), OpCasts({"softmax": torch.bfloat16}, "cpu"):
        ...     x.softmax(0).dtype, torch.log_softmax(x, 0).dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, types: dict[str, torch.dtype], device: str) -> None:
        super().__init__()
        self._types, self._device = types, device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = self._types.get(getattr(func, "__name__", ""))
        if dtype is None or "out" in kwargs or not torch.is_autocast_enabled(self._device):
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            return func(*cast(args, dtype), **cast(kwargs, dtype))
