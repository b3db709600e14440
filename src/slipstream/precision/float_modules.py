"""Which modules of a model stay fp32, and what runs around a module's forward.

Never casts a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from torch import nn

from slipstream.errors import StrategyError
from slipstream.strategy.validate import did_you_mean

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a forward with its positional and keyword arguments, and returns what it does."""


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module normalises: it has no modules inside, and says so by its class's name.

    Example:
        >>> [is_normalisation(m) for m in (nn.LayerNorm(2), nn.BatchNorm2d(2), nn.Linear(2, 2))]
        [True, True, False]
    """
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def float_modules(
    model: nn.Module, patterns: Sequence[str], *, normalisation: bool
) -> dict[str, nn.Module]:
    """The outermost modules that stay fp32, by path.

    Args:
        model: what is inside it may stay fp32, not all of it.
        patterns: of module paths: ``*`` and ``?`` stand for anything.
        normalisation: whether normalisation layers are among them, too.

    Raises:
        StrategyError: a pattern matches no module, or a parameter is shared with a module that
            does not stay fp32.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
        >>> [*float_modules(model, ["2"], normalisation=True)]
        ['1', '2']
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    del paths[""]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise StrategyError(
                f"precision.float_modules: {pattern!r} matches no module"
                f"{did_you_mean(pattern, paths)}; allowed: paths of modules, in which * and ? "
                "stand for anything"
            )
    chosen = {
        path: module
        for path, module in paths.items()
        if any(fnmatchcase(path, pattern) for pattern in patterns)
        or (normalisation and is_normalisation(module))
    }
    inside = {id(m) for module in chosen.values() for m in [*module.modules()][1:]}
    found: dict[str, nn.Module] = {}
    for path, module in chosen.items():
        if id(module) not in inside and module not in found.values():
            found[path] = module
    return found


def check_unshared(model: nn.Module, floats: dict[str, nn.Module]) -> None:
    """Refuse a parameter that would be fp32 in one module and 16 bits wide in another.

    Raises:
        StrategyError: names both.
    """
    wide = {id(p): name for path, m in floats.items() for name, p in _named(path, m)}
    inside = {id(m) for module in floats.values() for m in module.modules()}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in wide:
                raise StrategyError(
                    f"precision.float_modules: {wide[id(parameter)]} is the same parameter as "
                    f"{name}, of a module that is not fp32; list both modules, or neither"
                )


def _named(path: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{path}.{name}", parameter) for name, parameter in module.named_parameters()]


class Surrounded:
    """The forward of one module with something around it, until ``remove``.

    In the module's own dictionary and not as hooks: these do not hear of every way in which a
    forward ends, e.g. when a stage of a pipeline is left.
    """

    def __init__(self, module: nn.Module, around: Around) -> None:
        self.module = module
        self._around: Around | None = around
        self._before = vars(module).get("forward")
        vars(module)["forward"] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, also for whoever looks at its signature.

        Looked up each time: a bound method that is kept would not survive pickling.
        """
        return self._before or MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._around is None:
            self.remove()
            return self.__wrapped__(*args, **kwargs)
        return self._around(self.__wrapped__, args, kwargs)

    def remove(self) -> None:
        """Nothing is around the forward any more.

        What was put around this meanwhile calls it still, or puts it back later: it then only
        passes on, and goes with the next call.
        """
        self._around = None
        top = vars(self.module).pop("forward", None)
        while isinstance(top, Surrounded) and top._around is None:
            top = top._before
        if top is not None:
            vars(self.module)["forward"] = top
