"""Notices whether a script looks at gradients between backward and step, as `sharded` refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slipstream.gradients.shares import METADATA, ZEROING


class WatchedGradient(torch.Tensor):
    """A gradient that works as always, and notes when its values are read or changed."""

    noticed: GradientWatch
    zeroed = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        each = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
        for gradient in each:
            if isinstance(gradient, WatchedGradient):
                if func in ZEROING:
                    gradient.zeroed = True
                elif func not in METADATA:
                    gradient.noticed.seen = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class GradientWatch:
    """Watches the gradients of some updates.

    A gradient keeps its identity and its memory; only its class is another one from ``begin`` to
    ``end``.

    Attributes:
        seen: whether the script has read or changed a gradient, or looks at gradients and
            parameters in a hook of the optimizer's step.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> watch = GradientWatch(torch.optim.SGD([weight]))
        >>> watch.begin([weight])
        >>> weight.grad.shape, watch.seen
        (torch.Size([2]), False)
        >>> weight.grad.norm().item() > 1, watch.seen
        (True, True)
        >>> watch.end()
        >>> type(weight.grad) is torch.Tensor
        True
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._watched: list[torch.Tensor] = []
        self.seen = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """The averages are there: from now on whoever reads one is noticed."""
        self.seen = self.seen or self._has_hooks()
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                gradient.__class__ = WatchedGradient
                gradient.noticed = self  # type: ignore[attr-defined]
                self._watched.append(gradient)

    def end(self) -> None:
        """Give gradients their own class back: slipstream reads them now. Idempotent."""
        while self._watched:
            gradient: Any = self._watched.pop()
            del gradient.noticed
            gradient.__class__ = torch.Tensor

    def _has_hooks(self) -> bool:
        """Whether hooks that are not slipstream's run before a step."""
        handle = self._optimizer.register_step_pre_hook(lambda *_: None)
        hooks = handle.hooks_dict_ref() or {}
        handle.remove()
        return any(not str(hook.__module__).startswith("slipstream.") for hook in hooks.values())
