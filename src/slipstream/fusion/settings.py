"""Settings that a module's forward may read beside tensors, for what runs without its Python
code."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, and that a forward may read unnoticed."""
_HOOKS_OF_ALL: Iterable[dict[int, Any]] = [
    getattr(of_torch, f"_global{name}") for name in (*_HOOKS, "_forward_hooks_always_called")
]


def settings_of(block: nn.Module) -> Hashable:
    """The settings of a block and of all modules in it: plain attributes, those in lists, dicts and
    objects that modules have (a config), replaced methods, and hooks.

    Not seen: globals, and what functions hold.

    Example:
        >>> block = nn.Sequential(nn.Dropout(0.1))
        >>> before = settings_of(block)
        >>> block[0].p = 0.2
        >>> settings_of(block) == before
        False
    """
    seen: set[int] = set()
    found: list[Any] = [hooks_of(block)]
    for module in block.modules():
        kind = type(module)
        found += [id(module), kind, id(kind.forward)]
        for name, value in vars(module).items():
            if name not in OF_MODULES:
                _add(value, seen, found)
    return tuple(found)


def hooks_of(block: nn.Module) -> tuple[int, ...]:
    """Which hooks see the modules inside of a block; its own run outside of its forward."""
    inside = [m for m in block.modules() if m is not block]
    numbers = [n for m in inside for name in _HOOKS for n in getattr(m, name)]
    return (*numbers, *(n for hooks in _HOOKS_OF_ALL for n in hooks))


def _add(value: Any, seen: set[int], found: list[Any]) -> None:
    if isinstance(value, _PLAIN):
        found.append((type(value), value))
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, list | tuple | set | frozenset):
            for each in value:
                _add(each, seen, found)
        elif not isinstance(value, torch.Tensor | nn.Module):
            if not isinstance(value, dict):
                found.append(id(value))
            for key, each in _fields(value).items():
                found.append(str(key))
                _add(each, seen, found)


def _fields(value: Any) -> dict[str, Any]:
    """Entries of a dict; attributes of an object of the user's, and of its class. No id of what is
    returned may be kept: another dict may have it next."""
    if isinstance(value, dict):
        return value
    kind = type(value)
    if (
        isinstance(value, type)
        or not hasattr(value, "__dict__")
        or kind.__module__.partition(".")[0] in ("torch", "builtins")
    ):
        return {}
    return {**{k: v for k, v in vars(kind).items() if isinstance(v, _PLAIN)}, **vars(value)}
