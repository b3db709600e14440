"""Which modules of a model stay fp32, and a wrapper for a module's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from slipstream.errors import StrategyError
from slipstream.plain_copy import Attached, copy_plainly, detached
from slipstream.strategy.validate import did_you_mean

Modules = dict[str, nn.Module]
"""Modules by path."""

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a forward with its positional and keyword arguments and returns its result."""


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer: "norm" in its class name and no children.

    Example:
        >>> [is_normalisation(m) for m in (nn.LayerNorm(2), nn.BatchNorm2d(2), nn.Linear(2, 2))]
        [True, True, False]
    """
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def _is_rotary(module: nn.Module) -> bool:
    """Whether a module makes rotary positions: rounded to 16 bits, its frequencies would turn
    words that are far apart by whole radians."""
    return "rotary" in type(module).__name__.lower() and next(module.parameters(), None) is None


def _is_orthogonal(module: nn.Module) -> bool:
    """Whether a module's parametrization keeps a weight orthogonal: torch's exponentials of
    matrices become NaN in 16 bits, and its decompositions have none."""
    if not parametrize.is_parametrized(module):
        return False
    lists: Any = module.parametrizations
    return any("orthogonal" in type(p).__name__.lower() for each in lists.values() for p in each)


def modules_in_float(model: nn.Module, patterns: Sequence[str], *, normalisation: bool) -> Modules:
    """The outermost modules that stay fp32, by path.

    Args:
        model: searched without itself.
        patterns: of module paths, with ``*`` and ``?`` as wildcards.
        normalisation: whether normalisation layers, rotary positions and layers with orthogonal
            weights (``torch.nn.utils.parametrizations.orthogonal``) stay fp32, too.

    Raises:
        StrategyError: a pattern matches no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
        >>> [*modules_in_float(model, ["2"], normalisation=True)]
        ['1', '2']
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    del paths[""]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise StrategyError(
                f"precision.float_modules: {pattern!r} matches no module"
                f"{did_you_mean(pattern, paths)}; allowed: module paths with * and ? as wildcards"
            )
    kept_kinds = (is_normalisation, _is_rotary, _is_orthogonal) if normalisation else ()
    chosen = {
        path: module
        for path, module in paths.items()
        if any(fnmatchcase(path, pattern) for pattern in patterns)
        or any(kept(module) for kept in kept_kinds)
    }
    inside = {id(m) for module in chosen.values() for m in [*module.modules()][1:]}
    first: dict[nn.Module, str] = {}
    for path, module in chosen.items():
        if id(module) not in inside:
            first.setdefault(module, path)
    return {path: module for module, path in first.items()}


def check_not_tied(model: nn.Module, floats: Modules) -> None:
    """Refuse a tied parameter that would be fp32 in one module and 16-bit in another.

    Raises:
        StrategyError: names both.
    """
    wide = {id(p): name for path, m in floats.items() for name, p in m.named_parameters(path)}
    inside = {id(m) for module in floats.values() for m in module.modules()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in wide and id(module) not in inside:
                raise StrategyError(
                    f"precision.float_modules: {wide[id(parameter)]} is tied to {name}, whose "
                    "module is not fp32; list both modules, or neither"
                )


class WrappedForward(Attached):
    """Wraps the forward of one module until ``remove``.

    Stored as ``module.forward``. Hooks would not do: a forward hook is skipped when the forward
    ends by an exception, as it does where a pipeline leaves a stage early."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self.module = module
        self._around: Around | None = around
        self.replaced = vars(module).get("forward", Attached.replaced)
        vars(module)["forward"] = self
        copy_plainly(module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward; `inspect.signature` follows this name.

        Looked up on each access: a stored bound method would not survive pickling.
        """
        if self.replaced is Attached.replaced:
            return MethodType(type(self.module).forward, self.module)
        forward: Callable[..., Any] = self.replaced
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._around is None:
            self.remove()
            return self.__wrapped__(*args, **kwargs)
        return self._around(self.__wrapped__, args, kwargs)

    @contextmanager
    def running(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Inside, the next call wraps ``forward`` in place of the module's own: frameworks call
        steps as the module's forward."""
        own = self.replaced

        def once(*args: Any, **kwargs: Any) -> Any:
            self.replaced = own  # it may call the real forward
            return forward(*args, **kwargs)

        self.replaced = once
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a step may update the weights in between
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            self.replaced = own

    def remove(self) -> None:
        """Unwrap the forward.

        A wrapper installed later may still call this one or restore it: it then passes the call on
        and removes itself with the next call.
        """
        self._around = None
        top = vars(self.module).pop("forward", Attached.replaced)
        while isinstance(top, WrappedForward) and top._around is None:
            top = top.replaced
        if top is not Attached.replaced:
            vars(self.module)["forward"] = top
        detached(self.module)
