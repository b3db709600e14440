"""Give modules the parameters and settings of their first run when they run again in backward.

Buffers have their own file, as forward changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.pytree import LEAVES

_SCALARS = frozenset((bool, int, float, str, type(None)))
SMALL = 2**20
"""Bytes of a tensor in an attribute up to which a copy of it is kept: forward may change it."""
_FEW = 64
"""Values of a parameter that are compared, at most."""
_LESS = 0.1
"""Part of its first move by which a parameter that is normalised may move again: some divide by
norms to which they add a little."""
_DEPTH = 3
"""Containers in containers that are looked into for what a block writes into an object."""

_NO_HOLDERS = (*LEAVES, nn.Module, type, ModuleType, FunctionType, MethodType)
_ABSENT: Any = object()
Settings = list[tuple[object, dict[str, Any]]]
"""By module, object or dict: the values of some of its attributes or entries."""


class _Kept(NamedTuple):
    """A parameter as it was used."""

    module: nn.Module
    name: str
    parameter: Tensor
    alias: Tensor
    """Shares memory and version counter; keeps the memory where ``.data`` is assigned later."""
    version: int
    learned: bool


class StateReplay:
    """A context for recomputation; `record` wraps the first run.

    Settings are numbers, strings, flags, None and tensors in the attributes of a module, such as
    ``training``, or of one of ``objects``, which a model hands to its blocks. A block may leave a
    tensor in itself for its next call (``self.memory = ...``), or in an object for the next block
    (``batch.x = ...``; in a dataclass they are no settings). Those in lists are none. Settings from
    before the first run hold inside, and what recomputation changes is undone. Parameters are those
    of the first run, whatever the module has since: others under ``functional_call``, or ones that
    were assigned later.

    Raises:
        UsageError: on entry, a parameter was changed in place since; after the first run, it
            changed a tensor of more than `SMALL` bytes in an attribute in place.

    Example:
        >>> layer = nn.Dropout(0.0)
        >>> replay = StateReplay([layer])
        >>> with replay.record():
        ...     y = layer(torch.ones(2))
        >>> layer.p = 1.0
        >>> with replay:
        ...     layer(torch.ones(2))
        tensor([1., 1.])
        >>> layer.p
        1.0
    """

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[object] = ()) -> None:
        self._modules, self._objects = modules, objects
        self._settings: Settings = []
        self._kept: list[_Kept] = []
        self._copied: list[tuple[nn.Module, str, Tensor]] = []  # as they were before the first run
        self._outside: Settings = []
        self._replaced: list[tuple[nn.Module, str, Tensor | None]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Wrap the first run. Parameters are looked at when it ends, as they may come late."""
        modules = modules_in(self._modules)
        self._settings, names = _settings(modules, self._objects), _names(modules)
        tensors = [
            (owner, name, value)
            for owner, held in self._settings
            for name, value in held.items()
            if isinstance(value, Tensor)
        ]
        own = _storages(m for m in modules if tensors)  # which have a replay of their own
        before = [
            (m, k, t, _version(t), _copy(t) if t.nbytes <= SMALL else None)
            for m, k, t in tensors
            if isinstance(m, nn.Module) and _storage(t) not in own
        ]
        for _, held in self._settings if tensors else ():
            # without their graphs, each of which would keep the one of the step before
            held.update({k: _cut_off(v) for k, v in held.items()})
        yield
        self._settings += _made_since(names)
        self._copied = []
        for module, name, value, version, copy in before:
            if _version(value) == version:
                continue
            if copy is None:
                raise UsageError(
                    f"memory.recompute: the forward of a {type(module).__name__} changes {name}, a "
                    f"tensor in an attribute of {value.nbytes} bytes (allowed: {SMALL}), in place, "
                    "and would change it again in backward; register it as a buffer, or assign a "
                    f"new tensor: self.{name} = ..."
                )
            self._copied.append((module, name, copy))
        self._kept = [
            # the memory itself, whatever a class answers
            _Kept(m, name, p, torch.Tensor.detach(p), _version(p), p.requires_grad)
            for m in modules
            for name, p in m._parameters.items()
            if p is not None
        ]

    def __enter__(self) -> None:
        self._check_unchanged()
        self._outside, self._replaced = _now(self._settings), []
        _restore(self._settings)
        for module, name, copy in self._copied:  # once more for each repetition, which changes it
            vars(module)[name] = _copy(copy)
        for kept in self._kept:
            now = kept.module._parameters.get(kept.name)
            if (
                now is not kept.parameter
                or now.requires_grad != kept.learned
                or _address(now) != _address(kept.alias)
            ):
                self._replaced.append((kept.module, kept.name, now))
                alias: Any = kept.alias.detach().requires_grad_(kept.learned)
                kept.module._parameters[kept.name] = alias

    def __exit__(self, *_: object) -> None:
        for module, name, parameter in self._replaced:
            module._parameters[name] = parameter  # type: ignore[assignment]
        _restore(self._outside)
        self._outside, self._replaced = [], []

    def _check_unchanged(self) -> None:
        for kept in self._kept:
            if _version(kept.alias) != kept.version:
                raise UsageError(
                    f"memory.recompute: {kept.name} of a {type(kept.module).__name__}, of shape "
                    f"{list(kept.parameter.shape)}, was changed in place between forward and "
                    "backward, so the forward cannot be repeated; call backward before the "
                    "optimizer's step, or compute the loss again"
                )


class WrittenParameters:
    """A context for a recomputation, of which a run must leave parameters as they are; `record`
    wraps the first run.

    A forward that normalises weights, or masks them, writes nearly the same again, however much it
    moved them at first; one that moves an average moves it about as far once more, and computes
    something else in between. A few values of each parameter are compared, as autograd is not told
    of what is written through ``.data``.

    Raises:
        UsageError: on exit, names a parameter that has changed again.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: list[_Looked] = []
        self._moved: dict[tuple[nn.Module, str], float] = {}  # by the first run, at most

    @contextmanager
    def record(self) -> Iterator[None]:
        """Wrap the first run, and see how far that moves them."""
        before = self._look()
        yield
        for module, name, parameter, values in before:
            now = _few_values(parameter)
            if now.shape == values.shape != (0,):
                self._moved[module, name] = float((now - values).abs().max())

    def __enter__(self) -> None:
        self._before = self._look()

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, []
        for module, name, parameter, values in before:
            now = _few_values(parameter)
            exact = not (parameter.is_floating_point() or parameter.is_complex())
            rounding = 0 if exact else max(2 * torch.finfo(parameter.dtype).eps, 1e-5)
            size = values.abs().max() if len(values) else 0  # centred weights are near 0, some
            less = _LESS * self._moved.get((module, name), 0.0)
            if bool(((now - values).abs() > rounding * size + less).any()):
                raise UsageError(
                    f"memory.recompute: the forward of a {type(module).__name__} changes its "
                    f"parameter {name}, of shape {list(parameter.shape)}, and has changed it once "
                    "more in backward; what forward moves on belongs in a buffer: "
                    f"self.register_buffer({name!r}, ...); values for the time of a forward, as "
                    "quantized weights, belong beside the parameter, which would not get its own "
                    "back where a recomputation ends early: functional.linear(x, quantized)"
                )

    def _look(self) -> list[_Looked]:
        return [
            _Looked(module, name, p, _few_values(p))
            for module in modules_in(self._modules)
            for name, p in module._parameters.items()
            if p is not None and type(p.data) is Tensor and p.layout is torch.strided
        ]


class _Looked(NamedTuple):
    module: nn.Module
    name: str
    parameter: Tensor
    values: Tensor
    """A few, as they were."""


def _few_values(parameter: Tensor) -> Tensor:
    flat = torch.Tensor.detach(parameter).reshape(-1)
    few = flat[:: max(1, len(flat) // _FEW)][:_FEW]
    return few.to(torch.complex128 if few.is_complex() else torch.float64, copy=True)


@contextmanager
def settings_kept(
    module: nn.Module, objects: Sequence[object] = ()
) -> Iterator[list[tuple[object, str]]]:
    """Undo what a run changes in the settings of a module, of all modules in it and of objects.

    The list that it gives names them at the end: module, object or dict, and attribute or key.
    """
    modules, changed = modules_in([module]), list[tuple[object, str]]()
    settings, names = _settings(modules, objects), _names(modules)
    held = [t for m in modules for t in vars(m).values() if isinstance(t, Tensor)]
    written = [(t, _version(t), _copy(t)) for t in held if not t.is_inference()]
    try:
        yield changed
    finally:
        with torch.no_grad():
            for tensor, version, copy in written:
                if _version(tensor) != version:
                    tensor.copy_(copy)
        settings += _made_since(names)
        for (owner, now), (_, before) in zip(_now(settings), settings, strict=True):
            changed += [(owner, k) for k, value in before.items() if not _is_same(now[k], value)]
        _restore(settings)


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _SCALARS and one == other)


def modules_in(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules and all inside of them, each once; ten times as fast as ``modules()``."""
    found: dict[nn.Module, None] = {}
    ahead = [*modules]
    while ahead:
        module = ahead.pop()
        if module not in found:
            found[module] = None
            ahead += [child for child in module._modules.values() if child is not None]
    return [*found]


def _settings(modules: Iterable[nn.Module], objects: Iterable[object]) -> Settings:
    settings: Settings = [(module, _scalars(vars(module), Tensor)) for module in modules]
    for one in objects:
        seen = is_dataclass(one)  # its tensors are arguments of the checkpoint
        settings += [(held, _scalars(held, *[Tensor] * (not seen))) for held in _held_by(one)]
    return settings


def _scalars(values: Mapping[str, Any], *others: type) -> dict[str, Any]:
    return {k: v for k, v in values.items() if type(v) in _SCALARS or isinstance(v, others)}


def _names(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, frozenset[str]]]:
    return [(module, frozenset(vars(module))) for module in modules]


def _made_since(names: Iterable[tuple[nn.Module, frozenset[str]]]) -> Settings:
    """The settings that were not there before, as absent."""
    made = [(module, vars(module).keys() - before) for module, before in names]
    return [
        (module, dict.fromkeys(_scalars({k: vars(module)[k] for k in new}, Tensor), _ABSENT))
        for module, new in made
        if new
    ]


def _cut_off(value: Any) -> Any:
    """The value; a tensor with a graph without it."""
    has_graph = isinstance(value, Tensor) and value.grad_fn is not None
    return torch.Tensor.detach(value).requires_grad_() if has_graph else value


def _held_by(value: object, depth: int = _DEPTH) -> Iterator[dict[str, Any]]:
    """The attributes of an object, and those of what it holds."""
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not depth or not isinstance(held, dict) or isinstance(value, _NO_HOLDERS):
        return
    yield held
    for one in [*held.values()]:
        if not isinstance(one, _NO_HOLDERS):
            yield from _held_by(one, depth - 1)


def _values(owner: object) -> dict[str, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _now(settings: Settings) -> Settings:
    """The present values, of any type, in the places of ``settings``."""
    return [
        (owner, {name: _values(owner).get(name, _ABSENT) for name in before})
        for owner, before in settings
    ]


def _restore(settings: Settings) -> None:
    for owner, before in settings:
        now = _values(owner)
        for name, value in before.items():
            if value is _ABSENT:
                now.pop(name, None)
            elif now.get(name, _ABSENT) is not value:
                now[name] = value


def _copy(tensor: Tensor) -> Tensor:
    return torch.Tensor.detach(tensor).clone().requires_grad_(tensor.requires_grad)


def _storages(modules: Iterable[nn.Module]) -> set[int]:
    """Places of buffers in memory."""
    return {_storage(b) for m in modules for b in m._buffers.values() if b is not None}


def _storage(tensor: Tensor) -> int:
    """The place of a plain tensor's memory; 0 for others."""
    return tensor.untyped_storage().data_ptr() if _address(tensor) else 0


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    """Address of a plain tensor; 0 for others, which have no memory of their own."""
    plain = type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain else 0
