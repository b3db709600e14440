"""Which stage a module and a parameter belong to: a model cut at the paths of some modules.

Never runs the model: this is the static half, from the order in which modules are registered.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from slipstream.errors import ModelError


@dataclass(frozen=True)
class Cuts:
    """A model cut into stages; made by `cut_model`.

    Attributes:
        paths: modules at which stages 1, 2, ... begin.
        spans: first and last stage of every module by its path. Two stages or more only for a
            module around a cut: its forward runs on each of them.
        stateful: modules in which there is a parameter or a buffer.
        containers: modules that do no more than hold others, which the model may call itself.
    """

    paths: tuple[str, ...]
    spans: dict[str, tuple[int, int]]
    stateful: frozenset[str]
    containers: frozenset[str]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.paths) + 1

    def before(self, stage: int) -> list[str]:
        """The outermost modules that end before ``stage`` begins."""
        return self._outermost(path for path, (_, last) in self.spans.items() if last < stage)

    def after(self, stage: int) -> list[str]:
        """The outermost modules that begin after ``stage`` ends."""
        return self._outermost(path for path, (first, _) in self.spans.items() if first > stage)

    def ending(self, stage: int) -> list[str]:
        """Modules that end in ``stage``, and that do not run on a stage after it."""
        later = {path for after in range(stage + 1, self.stages) for path in self.before(after)}
        return [path for path in self.spans if path in later and self.spans[path][1] == stage]

    def _outermost(self, paths: Iterable[str]) -> list[str]:
        """Of these paths those of modules that are called, and not inside of another one."""
        found = dict.fromkeys(path for path in paths if path not in self.containers)
        return [path for path in found if not any(outer in found for outer in _around(path))]

    def holders(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter and buffer, by every name that it goes by.

        One that two modules share belongs to the stages of both, and one of a module around a cut
        to all stages of that module.
        """
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        stages: dict[int, set[int]] = {}
        for name, tensor in named:
            first, last = self.spans[name.rpartition(".")[0]]
            stages.setdefault(id(tensor), set()).update(range(first, last + 1))
        return {name: tuple(sorted(stages[id(tensor)])) for name, tensor in named}


def cut_model(model: nn.Module, paths: Sequence[str]) -> Cuts:
    """Cut ``model`` where the modules at ``paths`` begin, which are given in order of execution.

    Raises:
        ModelError: a path that the model does not have, the model itself, a path twice, or paths
            that are not in the order of ``model.named_modules()``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        >>> cut_model(model, ["1"]).spans
        {'': (0, 1), '0': (0, 0), '1': (1, 1), '2': (1, 1)}
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    place = {name: number for number, name in enumerate(names)}
    for path in paths:
        if path not in place or not path:
            near = difflib.get_close_matches(path, names[1:], n=3) or names[1:4]
            raise ModelError(
                f"cut at {path!r}, but {type(model).__name__} has no module of that path; allowed: "
                f"paths of model.named_modules(), e.g. {near}"
            )
        if list(paths).count(path) > 1:
            raise ModelError(f"cut at {path!r} twice; allowed: each path once")
    if list(paths) != (ordered := sorted(paths, key=place.__getitem__)):
        raise ModelError(
            f"cuts {list(paths)} are out of order; allowed: the order in which "
            f"{type(model).__name__} registers them, which is {ordered}"
        )
    stage = {name: sum(place[path] <= place[name] for path in paths) for name in names}
    spans = {name: (stage[name], stage[name]) for name in names}
    for name in names:
        for outer in _around(name):
            spans[outer] = (spans[outer][0], max(spans[outer][1], stage[name]))
    named = [
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(name for name, _ in model.named_buffers(remove_duplicate=False)),
    ]
    stateful = {outer for name in named for outer in _around(name)}
    containers = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).forward in (nn.Module.forward, nn.Sequential.forward)
    }
    for path in paths:
        if isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            raise ModelError(
                f"cut at {path!r}, a {type(model.get_submodule(path)).__name__}, which is never "
                f"called; allowed: a module that is, e.g. its first, {path}.0"
            )
    return Cuts(tuple(paths), spans, frozenset(stateful), frozenset(containers))


def _around(name: str) -> list[str]:
    """The paths of all modules that a module or parameter of that name is inside of."""
    if not name:
        return []
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]
