"""Copies of a model go without what techniques have attached to it.

[Note: How a copy is made]
``copy.deepcopy``, ``copy.copy``, ``pickle`` and ``torch.save`` ask an object how to copy it, by
``__deepcopy__`` or ``__reduce_ex__``, and look both up on the object before its class. So an
attribute of one module or one tensor decides for all four, and no class is patched. A module still
answers by the methods of its own class, but these find its attributes without what was attached.
Hooks and overrides of others stay, and are copied as torch does. ``torch.jit.script``, which
compiles hooks of forward, asks in the same way; it could be given a copy, but of a layer it would
put that into the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slipstream.errors import UsageError

_ABSENT: Any = object()
_METHODS = ("__deepcopy__", "__reduce_ex__")
_SCRIPTED = "__prepare_scriptable__"
_HOOKS = "_hooks"
"""In the names of a module's dicts of hooks, and of dicts that say more about some of them."""


class Attached:
    """Marks what a technique puts into a module: among its hooks, or as an attribute.

    Attributes:
        replaced: what the attribute was before; absent if there was none.
    """

    replaced: Any = _ABSENT


class _Hook(Attached):
    """A hook of a technique; torch sets attributes on some hooks."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)


class _Copier(Attached):
    """Stands for a method of ``owner`` that copies it."""

    def __init__(self, owner: nn.Module, method: str) -> None:
        self._owner, self._method = owner, method
        self.replaced = vars(owner).get(method, _ABSENT)

    def __call__(self, argument: Any) -> Any:
        with _without_attached(self._owner):
            return getattr(self._owner, self._method)(argument)


class _Unscripted(Attached):
    """Stands for the method of a module by which ``torch.jit.script`` asks what to compile."""

    def __call__(self) -> NoReturn:
        raise UsageError(
            "torch.jit.script of a module to which an open session has attached hooks, which "
            "TorchScript cannot compile; script a plain copy: "
            "torch.jit.script(copy.deepcopy(model)), or the module after close()"
        )


_UNSCRIPTED = _Unscripted()


def attach(
    register: Callable[..., RemovableHandle], hook: Callable[..., Any], **options: Any
) -> Callable[[], None]:
    """Register a hook that copies of the module do not have; returns how to remove it.

    Args:
        register: a bound method of a module, such as ``module.register_forward_hook``.
        hook: as that method takes it.
        options: of that method.

    Example:
        >>> layer = nn.Identity()
        >>> remove = attach(layer.register_forward_hook, lambda module, args, output: 2 * output)
        >>> layer(3), copy.deepcopy(layer)(3)
        (6, 3)
        >>> remove()
        >>> layer(3)
        3
    """
    module: nn.Module = register.__self__  # type: ignore[attr-defined]
    handle = register(_Hook(hook), **options)
    copy_plainly(module, scripts="state_dict" in register.__name__)

    def remove() -> None:
        handle.remove()
        detached(module)

    return remove


def copy_plainly(module: nn.Module, *, scripts: bool = False) -> None:
    """Copies of ``module`` go without what is attached to it; call it after attaching.

    Args:
        module: to which something was attached.
        scripts: whether ``torch.jit.script`` can compile what that was, or leaves it alone.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return  # copied by its own engine, which knows nothing of attributes and hooks set later
    for method in _METHODS:
        if hasattr(module, method) and not isinstance(vars(module).get(method), _Copier):
            vars(module)[method] = _Copier(module, method)
    if not (scripts or hasattr(module, _SCRIPTED)):
        vars(module)[_SCRIPTED] = _UNSCRIPTED


def detached(module: nn.Module) -> None:
    """Something was taken off ``module``: restore its own way of copying if it was the last."""
    here = vars(module)
    others = (value for name, value in here.items() if name not in (*_METHODS, _SCRIPTED))
    if _numbers_of_attached(here) or any(isinstance(value, Attached) for value in others):
        return
    for method in _METHODS:
        copier = here.get(method)
        if isinstance(copier, _Copier):
            _put(here, method, copier.replaced)
    if here.get(_SCRIPTED) is _UNSCRIPTED:
        del here[_SCRIPTED]


def refuse_copies(module: nn.Module, error: Callable[[], Exception]) -> Callable[[], None]:
    """Whoever copies or pickles ``module`` gets ``error()``; returns how to end that.

    Example:
        >>> layer = nn.Identity()
        >>> end = refuse_copies(layer, lambda: TypeError("only one of these"))
        >>> copy.deepcopy(layer)
        Traceback (most recent call last):
        TypeError: only one of these
        >>> end()
        >>> copy.deepcopy(layer)
        Identity()
    """
    here = vars(module)
    before = {method: here.get(method, _ABSENT) for method in _METHODS}

    def refuse(_: object) -> NoReturn:
        raise error()

    here.update(dict.fromkeys(_METHODS, refuse))

    def end() -> None:
        for method, value in before.items():
            _put(here, method, value)

    return end


def copy_as(tensor: torch.Tensor, plain: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Copies of ``tensor`` are copies of what ``plain`` returns; returns how to end that.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> end = copy_as(weight, lambda: torch.full((2,), 1.001))
        >>> copy.deepcopy(weight)
        Parameter containing:
        tensor([1.0010, 1.0010], requires_grad=True)
        >>> end()
        >>> copy.deepcopy(weight).dtype
        torch.bfloat16
    """

    kind = type(tensor)

    def value() -> torch.Tensor:
        values = plain().detach().clone()
        if isinstance(tensor, nn.Parameter):
            values = kind(values, tensor.requires_grad)
        own = {name: kept for name, kept in vars(tensor).items() if name not in _METHODS}
        vars(values).update(own)
        return values

    here = vars(tensor)
    # copy.deepcopy, which keeps the value alive: its id is in the memo
    here["__deepcopy__"] = lambda memo: copy.deepcopy(value(), memo)
    here["__reduce_ex__"] = lambda protocol: value().__reduce_ex__(protocol)

    def end() -> None:
        for method in _METHODS:
            here.pop(method, None)

    return end


@contextmanager
def _without_attached(module: nn.Module) -> Iterator[None]:
    """Inside, the module has other attributes: a dict of its own without what was attached."""
    here = vars(module)
    gone = _numbers_of_attached(here)
    plain: dict[str, Any] = {}
    for name, value in here.items():
        while isinstance(value, Attached):
            value = value.replaced
        if gone and _HOOKS in name and isinstance(value, dict):
            kept = {number: hook for number, hook in value.items() if number not in gone}
            value = type(value)(kept)
        _put(plain, name, value)
    object.__setattr__(module, "__dict__", plain)
    try:
        yield
    finally:
        object.__setattr__(module, "__dict__", here)


def _numbers_of_attached(attributes: Mapping[str, Any]) -> set[int]:
    """torch's numbers of the attached hooks among a module's attributes."""
    return {
        number
        for name, hooks in attributes.items()
        if _HOOKS in name and isinstance(hooks, dict)
        for number, hook in hooks.items()
        if isinstance(getattr(hook, "hook", hook), Attached)  # torch wraps some hooks
    }


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, or delete it if the value is absent."""
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value
