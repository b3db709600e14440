"""What a model finds in the place of some of its modules while one of its stages runs.

Never stays: when the run ends, by an exception or not, the model has its own modules again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.pytree import tensors

Act = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""What happens when the module is called: it, its positional and its keyword arguments."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor that is somewhere else."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)

    def on_meta(self, requires_grad: bool) -> torch.Tensor:
        """A contiguous tensor without data, for torch to read shape and dtype off."""
        empty = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return empty.requires_grad_(requires_grad)


def placeholder(like: TensorSpec | torch.Tensor) -> torch.Tensor:
    """A tensor of that shape that takes the memory of one element: NaN, or 0 if no float.

    Whoever computes with it unknowingly gets NaN.

    Example:
        >>> x = placeholder(torch.zeros(1000, 1000))
        >>> x.shape, bool(x.isnan().all()), x.untyped_storage().nbytes()
        (torch.Size([1000, 1000]), True, 4)
    """
    value = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def has_nan(value: Any) -> bool:
    """Whether a floating-point tensor in ``value`` holds a NaN."""
    return any(bool(x.isnan().any()) for x in tensors(value) if x.is_floating_point())


class _InPlaceOf(nn.Module):
    """Answers a call of a module by an act, and lends its attributes."""

    def __init__(self, module: nn.Module, act: Act) -> None:
        super().__init__()
        # In the instance's own dictionary, else it would be a submodule.
        self.__dict__.update(_module=module, _act=act)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._act(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


@contextmanager
def replaced(model: nn.Module, acts: Mapping[str, Act]) -> Iterator[None]:
    """Inside, calls of the modules at these paths are answered by acts.

    A module keeps its place in its parent, hence its name; its parent, and what its parent's
    parents do, is the model's own.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0))
        >>> with replaced(model, {"0": lambda module, args, kwargs: args[0] + 1}):
        ...     model(torch.zeros(1, 2))
        tensor([1., 1.])
    """
    own = []
    for path in acts:
        parent, _, name = path.rpartition(".")
        own.append((model.get_submodule(parent), name, model.get_submodule(path)))
    try:
        for (parent_module, name, module), act in zip(own, acts.values(), strict=True):
            setattr(parent_module, name, _InPlaceOf(module, act))
        yield
    finally:
        for parent_module, name, module in own:
            setattr(parent_module, name, module)
