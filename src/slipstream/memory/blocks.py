"""The repeated blocks of a model, and the modules that patterns name.

Never runs the model: this is read off its modules, in the order in which they are registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import StrategyError

_Shape = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]


def blocks_of(model: nn.Module) -> list[str]:
    """Paths of the repeated blocks: the layers of a transformer, the residual blocks of a ResNet.

    A block is a child of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` whose class occurs
    there twice with parameters of the same shapes, here or elsewhere in the model; only the
    outermost count. One that stands in several places has the first of its paths.

    Example:
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)]
        >>> blocks_of(nn.Sequential(nn.Linear(4, 8), nn.ModuleList(layers)))
        ['1.0', '1.1', '1.2']
    """
    classes: set[type[nn.Module]] = set()
    for module in model.modules():
        shapes = Counter(_shape(member) for member in _members(module) if _may_repeat(member))
        classes.update(kind for (kind, _), count in shapes.items() if count > 1)
    found: dict[nn.Module, str] = {}
    for path, block in _found(model, "", classes):
        found.setdefault(block, path)
    return list(found.values())


def matching(model: nn.Module, patterns: Sequence[str], setting: str) -> list[str]:
    """Paths of the modules that ``patterns`` name, in the order of ``model.named_modules()``.

    ``*`` and ``?`` stand for anything; of modules inside one another that one pattern names the
    outermost counts. One that stands in several places may be named by any of its paths.

    Args:
        model: not named itself by any pattern.
        patterns: of paths.
        setting: where they were written, for messages.

    Raises:
        StrategyError: a pattern that no module matches (names the nearest), one that names a list
            that is never called, or modules inside one another.

    Example:
        >>> matching(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["?"], "here")
        ['0', '1']
    """
    paths = {path: module for path, module in model.named_modules() if path}
    first = {module: path for path, module in paths.items()}
    every = model.named_modules(remove_duplicate=False)
    places = {place: first[module] for place, module in every if module in first}
    found: dict[str, str] = {}
    for pattern in patterns:
        named = _outermost([path for place, path in places.items() if fnmatchcase(place, pattern)])
        if not named:
            near = get_close_matches(pattern.replace("*", ""), places, 3, cutoff=0.3)
            raise StrategyError(
                f"{setting}: no module matches {pattern!r}; "
                f"near it: {', '.join(near or list(paths)[:3])}"
            )
        for path in named:
            if type(paths[path]).forward is nn.Module.forward:
                raise StrategyError(
                    f"{setting}: {path} is a {type(paths[path]).__name__}, which is never called; "
                    f"name the modules in it: {path}.*"
                )
            found.setdefault(path, pattern)
    for path, pattern in found.items():
        for outer in _around(path):
            if outer in found:
                raise StrategyError(
                    f"{setting}: {path} (of {pattern!r}) is inside of {outer} (of "
                    f"{found[outer]!r}); name one of the two"
                )
    return [path for path in paths if path in found]


def _found(
    module: nn.Module, path: str, classes: set[type[nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".removeprefix(".")
        if _members(module) and type(child) in classes and _may_repeat(child):
            yield inner, child
        else:
            yield from _found(child, inner, classes)


def _members(module: nn.Module) -> list[nn.Module]:
    """Of a list of modules, each as often as it stands there; of anything else none."""
    match module:
        case nn.ModuleDict():
            return list(module.values())
        case nn.ModuleList() | nn.Sequential():
            return list(module)
        case _:
            return []


def _may_repeat(module: nn.Module) -> bool:
    """Whether it is more than one layer: torch's own layers without children are not."""
    own = type(module).__module__.startswith("torch.nn.")
    called = type(module).forward is not nn.Module.forward
    trained = next(module.parameters(), None) is not None
    return called and trained and (not own or next(module.children(), None) is not None)


def _shape(module: nn.Module) -> _Shape:
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _outermost(paths: Sequence[str]) -> list[str]:
    known = set(paths)
    return [path for path in paths if not known.intersection(_around(path))]


def _around(path: str) -> list[str]:
    """The paths of the modules that a module is inside of, but for the model."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
