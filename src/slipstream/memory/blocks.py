"""Find the repeated blocks of a model, and the modules that path patterns name.

Reads the registered modules; never runs the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn

from slipstream.errors import StrategyError


def blocks_of(model: nn.Module) -> list[str]:
    """Paths of the repeated blocks: the layers of a transformer, the residual blocks of a ResNet.

    A block is a member of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` whose class occurs at
    least twice with parameters of the same shapes in one such container of the model. Only
    outermost blocks count. A block that is registered in several places has its first path.

    Example:
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)]
        >>> blocks_of(nn.Sequential(nn.Linear(4, 8), nn.ModuleList(layers)))
        ['1.0', '1.1', '1.2']
    """
    repeated: set[type[nn.Module]] = set()
    for module in model.modules():
        members = filter(_can_be_block, _members(module))
        shapes = Counter(
            (type(member), tuple((name, p.shape) for name, p in member.named_parameters()))
            for member in members
        )
        repeated.update(kind for (kind, _), count in shapes.items() if count > 1)
    paths: dict[nn.Module, str] = {}
    for path, block in _outermost_blocks(model, "", repeated):
        paths.setdefault(block, path)
    return list(paths.values())


def matching(model: nn.Module, patterns: Sequence[str], setting: str) -> list[str]:
    """Paths of the modules that ``patterns`` match, in the order of ``model.named_modules()``.

    Patterns are those of ``fnmatch`` (``*``, ``?``, ``[...]``). If one pattern matches a module and
    its submodules, only the outermost counts. A module that is registered in several places may be
    named by any of its paths.

    Args:
        model: its root is not matched by any pattern.
        patterns: of module paths.
        setting: where the patterns were written, for error messages.

    Raises:
        StrategyError: a pattern matches nothing (the message names the nearest paths), matches a
            container that is never called or a ScriptModule, or two patterns match a module and
            one of its submodules.

    Example:
        >>> matching(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["?"], "here")
        ['0', '1']
    """
    modules = {path: module for path, module in model.named_modules() if path}
    first_path = {module: path for path, module in modules.items()}
    everywhere = model.named_modules(remove_duplicate=False)
    canonical = {path: first_path[module] for path, module in everywhere if module in first_path}
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        matches = _outermost([c for path, c in canonical.items() if fnmatchcase(path, pattern)])
        if not matches:
            near = get_close_matches(pattern.replace("*", ""), canonical, 3, cutoff=0.3)
            raise StrategyError(
                f"{setting}: no module matches {pattern!r}; "
                f"nearest: {', '.join(near or list(modules)[:3])}"
            )
        for path in matches:
            _check_wrappable(path, modules[path], setting)
            pattern_of.setdefault(path, pattern)
    for path, pattern in pattern_of.items():
        for parent in _parents(path):
            if parent in pattern_of:
                raise StrategyError(
                    f"{setting}: {path} (matched by {pattern!r}) is inside of {parent} (matched by "
                    f"{pattern_of[parent]!r}); name only one of the two"
                )
    return [path for path in modules if path in pattern_of]


def _check_wrappable(path: str, module: nn.Module, setting: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise StrategyError(
            f"{setting}: {path} is a ScriptModule, whose forward cannot be wrapped; build the "
            "model without torch.jit.script"
        )
    if type(module).forward is nn.Module.forward:
        raise StrategyError(
            f"{setting}: {path} is a {type(module).__name__}, which is never called; name its "
            f"members instead: {path}.*"
        )


def _outermost_blocks(
    module: nn.Module, path: str, repeated: set[type[nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}".removeprefix(".")
        if _members(module) and type(child) in repeated and _can_be_block(child):
            yield child_path, child
        else:
            yield from _outermost_blocks(child, child_path, repeated)


def _members(module: nn.Module) -> list[nn.Module]:
    """Members of a container, with repetitions (unlike ``children()``); of other modules none."""
    containers = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
    return [*module._modules.values()] if isinstance(module, containers) else []


def _can_be_block(module: nn.Module) -> bool:
    """Whether a module has parameters, is called, and is more than a single layer of torch.

    ScriptModules are excluded: their forward cannot be wrapped.
    """
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return False
    is_torch_layer = type(module).__module__.startswith("torch.nn.")
    has_parameters = next(module.parameters(), None) is not None
    has_children = next(module.children(), None) is not None
    return has_parameters and (has_children or not is_torch_layer)


def _outermost(paths: Sequence[str]) -> list[str]:
    known = set(paths)
    return [path for path in paths if not known.intersection(_parents(path))]


def _parents(path: str) -> list[str]:
    """Paths of the modules that contain the module at ``path``, without the root.

    Example:
        >>> _parents("encoder.layer.0")
        ['encoder', 'encoder.layer']
    """
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
