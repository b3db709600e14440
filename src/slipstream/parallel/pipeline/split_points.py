"""Assigns modules and parameters to pipeline stages, given the modules at which stages begin.

Works on the order in which modules are registered; never runs the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import ModelError


@dataclass(frozen=True)
class SplitPoints:
    """The modules at which a model is split into stages; made by `SplitPoints.of`.

    Attributes:
        paths: modules at which stages 1, 2, ... begin.
        spans: by path of a module, its first and last stage. They differ only for a module around a
            split point: its forward runs on each of its stages.
        stateful: paths of modules that hold, at any depth, a parameter or a buffer of
            ``state_dict()``; buffers that are not saved (rotary frequencies) are on every rank.
        containers: paths of modules that only hold other modules, which the model may call itself.
    """

    paths: tuple[str, ...]
    spans: dict[str, tuple[int, int]]
    stateful: frozenset[str]
    containers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, paths: Sequence[str]) -> SplitPoints:
        """Split ``model`` at the modules ``paths``, given in order of execution.

        Raises:
            ModelError: a path that the model does not have, the model itself, a path twice, a
                module that is never called, or paths that are not in the order of
                ``model.named_modules()``.

        Example:
            >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
            >>> SplitPoints.of(model, ["1"]).spans
            {'': (0, 1), '0': (0, 0), '1': (1, 1), '2': (1, 1)}
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        order = {name: number for number, name in enumerate(modules)}
        _check_paths(type(model).__name__, paths, modules, order)
        begins = {n: sum(order[path] <= number for path in paths) for n, number in order.items()}
        ends = dict(begins)
        for name, stage in begins.items():
            for outer in _outer_modules(name):
                ends[outer] = max(ends[outer], stage)
        spans = {name: (begins[name], ends[name]) for name in modules}
        saved = [name for name, _ in _tensors(model) if not _is_constant(modules, name)]
        stateful = {outer for name in saved for outer in _outer_modules(name)}
        containers = {name for name, module in modules.items() if is_list(module)}
        return cls(tuple(paths), spans, frozenset(stateful), frozenset(containers))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.paths) + 1

    def before(self, stage: int) -> list[str]:
        """The outermost modules that end before ``stage`` begins."""
        return self._outermost(path for path, (_, last) in self.spans.items() if last < stage)

    def after(self, stage: int) -> list[str]:
        """The outermost modules that begin after ``stage`` ends."""
        return self._outermost(path for path, (first, _) in self.spans.items() if first > stage)

    def ending(self, stage: int) -> list[str]:
        """Modules that end in ``stage`` and are replaced by placeholders on a later stage."""
        later_stages = range(stage + 1, self.num_stages)
        replaced = {path for later in later_stages for path in self.before(later)}
        return [path for path in self.spans if path in replaced and self.spans[path][1] == stage]

    def tensor_stages(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter and buffer, under every name it has.

        A tied one belongs to the stages of all its modules, and one of a module around a split
        point to all stages of that module.
        """
        named = _tensors(model)
        stages: dict[int, set[int]] = {}
        for name, tensor in named:
            first, last = self.spans[name.rpartition(".")[0]]
            stages.setdefault(id(tensor), set()).update(range(first, last + 1))
        return {name: tuple(sorted(stages[id(tensor)])) for name, tensor in named}

    def _outermost(self, paths: Iterable[str]) -> list[str]:
        """Keep of ``paths`` the modules that are called, and are not inside another one of them."""
        called = dict.fromkeys(path for path in paths if path not in self.containers)
        return [path for path in called if called.keys().isdisjoint(_outer_modules(path))]


def _check_paths(
    kind: str, paths: Sequence[str], modules: dict[str, nn.Module], order: dict[str, int]
) -> None:
    for path in paths:
        if path not in order or not path:
            names = list(modules)[1:]
            near = difflib.get_close_matches(path, names, n=3) or names[:3]
            raise ModelError(
                f"cut at {path!r}, but {kind} has no module of that path; allowed: paths of "
                f"model.named_modules(), e.g. {near}"
            )
        if list(paths).count(path) > 1:
            raise ModelError(f"cut at {path!r} twice; allowed: each path once")
    if list(paths) != (ordered := sorted(paths, key=order.__getitem__)):
        raise ModelError(
            f"cut {list(paths)} is out of order; allowed: the order in which {kind} registers the "
            f"modules, which is {ordered}"
        )
    for path in paths:
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
            raise ModelError(
                f"cut at {path!r}, a {type(modules[path]).__name__}, which is never called; "
                f"allowed: a module that is called, e.g. its first, {path}.0"
            )


def is_list(module: nn.Module) -> bool:
    """Whether it only calls its children in turn, or leaves that to its parent."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under every name they have."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def _is_constant(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether it is a buffer that is not saved, as it is made with the model."""
    path, _, key = name.rpartition(".")
    return key in modules[path]._non_persistent_buffers_set


def _outer_modules(name: str) -> list[str]:
    """The paths of all modules around a module or parameter of that name."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts))]
