"""Notices whether a script looks at gradients between backward and step, as `sharded` refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from slipstream.gradients.shards import METADATA, ZEROING
from slipstream.pytree import among
from slipstream.sharding.step_hooks import is_foreign


class WatchedGradient(torch.Tensor):
    """A gradient that works as always, and notes when its values are read or changed."""

    noticed: GradientWatch

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA and func not in ZEROING:
            for gradient in among([args, *kwargs.values()], WatchedGradient):
                gradient.noticed.notice()  # no argument is watched from here on
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class GradientWatch:
    """Watches the gradients of some updates.

    A gradient keeps its identity and its memory; only its class is another one, from ``begin``
    until ``end`` or until the first look at values, which gets those of a plain tensor.

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
        self._watched: list[WatchedGradient] = []
        self.seen = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch the averages, which are there: whoever reads one from now on is noticed."""
        self.seen = self.seen or self._has_hooks()
        if self.seen:
            return
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                gradient.__class__ = WatchedGradient
                watched = cast(WatchedGradient, gradient)
                watched.noticed = self
                self._watched.append(watched)

    def notice(self) -> None:
        """Note that the script looks at gradients; that is all there is to find out."""
        self.seen = True
        self.end()

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
        return any(map(is_foreign, hooks.values()))
