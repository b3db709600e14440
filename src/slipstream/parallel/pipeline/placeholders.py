"""Replaces calls of a model's modules while one of its stages runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.comm.tensor_spec import TensorSpec
from slipstream.pytree import tensors

CallOverride = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Answers a call of a module, given the module, its positional and its keyword arguments."""


def placeholder(like: TensorSpec | torch.Tensor, integer: int = 0) -> torch.Tensor:
    """A tensor of that shape with the memory of one element: NaN, or ``integer`` (also for bool).

    NaN in a result shows that a placeholder was used in a computation; integers show nothing, but
    the result is another one with other integers.

    Example:
        >>> x = placeholder(torch.zeros(1000, 1000))
        >>> x.shape, bool(x.isnan().all()), x.untyped_storage().nbytes()
        (torch.Size([1000, 1000]), True, 4)
    """
    value = float("nan") if knows_nan(like) else integer
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def knows_nan(like: TensorSpec | torch.Tensor) -> bool:
    """Whether numbers of that type may be NaN."""
    return like.dtype.is_floating_point or like.dtype.is_complex


def has_nan(value: Any, *, everywhere: bool = False) -> bool:
    """Whether a floating-point tensor in ``value`` holds a NaN, or nothing else."""
    found = (x.isnan() for x in tensors(value) if x.is_floating_point() and x.numel())
    return any(bool(one.all() if everywhere else one.any()) for one in found)


class _OverriddenModule(nn.Module):
    """Passes calls to an override, and attribute reads to the module itself."""

    def __init__(self, module: nn.Module, override: CallOverride) -> None:
        super().__init__()
        # nn.Module.__setattr__ would register the module as a child.
        self.__dict__.update(_module=module, _override=override)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._override(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


@contextmanager
def overridden_calls(model: nn.Module, overrides: Mapping[str, CallOverride]) -> Iterator[None]:
    """Inside, calls of the modules at these paths go to ``overrides``.

    The modules are replaced in their parents, so that the parents run their own forward, and are
    restored on exit, also after an exception.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0))
        >>> with overridden_calls(model, {"0": lambda module, args, kwargs: args[0] + 1}):
        ...     model(torch.zeros(1, 2))
        tensor([1., 1.])
    """
    slots = []
    for path in overrides:
        parent, _, name = path.rpartition(".")
        slots.append((model.get_submodule(parent), name, model.get_submodule(path)))
    try:
        for (parent_module, name, module), override in zip(slots, overrides.values(), strict=True):
            setattr(parent_module, name, _OverriddenModule(module, override))
        yield
    finally:
        for parent_module, name, module in slots:
            setattr(parent_module, name, module)
