"""Tells hooks of a step of its closure, and whether it is a ``super().step()`` inside of another.

torch wraps the ``step`` of each class of which an optimizer was made, and hooks of an optimizer run
in every wrapper. So where somebody has made a ``SGD``, the hooks of a subclass with a ``step`` of
its own run twice: around that, and around the ``super().step()`` in it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Find the closure among the arguments of a step, of which the first is the optimizer. Others
    are the own ones of a class, as the size of the batch that SophiaG takes.

    Example:
        >>> closure_of(("optimizer",), {"bs": 4096}) is None
        True
    """
    given = (*args[1:], *kwargs.values())
    return next((one for one in given if callable(one) and not isinstance(one, Module)), None)


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a hook of a step is called inside of another step of the same optimizer.

    Looks at the stack, as a step that has raised leaves nothing else behind.

    Example:
        >>> import torch
        >>> class Mine(torch.optim.SGD):
        ...     def step(self, closure=None):
        ...         return super().step(closure)
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> other, mine = torch.optim.SGD([weight]), Mine([weight])
        >>> handle = mine.register_step_pre_hook(lambda *_: print(is_nested(mine)))
        >>> mine.step()
        False
        True
    """
    steps = (vars(kind).get("step") for kind in type(optimizer).__mro__)
    if sum(hasattr(step, "hooked") for step in steps) < 2:
        return False
    found, frame = 0, _around(sys._getframe())
    while frame is not None:
        # a stand-in for an optimizer has its attributes
        found += getattr(frame.f_locals.get("self"), "__dict__", None) is vars(optimizer)
        frame = _around(frame)
    return found > 1


def around_all(
    act: Callable[..., None], inside: Callable[[Optimizer], None] = lambda optimizer: None
) -> Callable[..., None]:
    """A hook that calls ``act`` around a whole step, and ``inside`` around a ``super().step()`` in
    it; torch.compile does not trace it."""

    def hook(optimizer: Optimizer, *rest: Any) -> None:
        if is_nested(optimizer):
            inside(optimizer)
        else:
            act(optimizer, *rest)

    hook.__module__ = act.__module__  # `InnerHooks` sorts hooks by it
    eager: Any = torch.compiler.disable
    hooked: Callable[..., None] = eager(hook)
    return hooked


def stepping(optimizer: Any) -> Any:
    """Find the optimizer that steps: that inside of Accelerate's, which does nothing in the passes
    before the last one of a window."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def let_have_hooks(optimizer: Any) -> None:
    """Do what ``Optimizer.__init__`` does for hooks of a step, where a class around another
    optimizer does not call it (Lookahead)."""
    if isinstance(optimizer, Optimizer) and not hasattr(optimizer, "_zero_grad_profile_name"):
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if not hasattr(type(optimizer), name):  # its step is that of others of the class, too
                setattr(type(optimizer), name, OrderedDict())
            vars(optimizer).setdefault(name, OrderedDict())
        optimizer._patch_step_function()


def _around(frame: FrameType) -> FrameType | None:
    """The next wrapper of a step outside of a frame."""
    outer = frame.f_back
    while outer is not None and outer.f_code is not _WRAPPER:
        outer = outer.f_back
    return outer
