"""The operations of one module's own ``forward``, with its children as they are.

``torch.fx`` records a forward by running it once with stand-ins for tensors. Whatever else it reads
then is taken as it is at that moment, so each such thing is either checked in every later call or
refused here. Recording module by module keeps every child a call, with its hooks; a forward that
cannot be recorded leaves the others alone.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from slipstream.memory.recompute.rng_state import get_rng_state

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, and that a forward may read unnoticed."""
IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imatmul, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
    *(operator.ilshift, operator.irshift),
)
"""The functions of ``a += b`` and the like."""


class Untraceable(Exception):
    """A forward that cannot be recorded; says why."""


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The recorded forward of ``block``, for calls with tensors for the arguments without default,
    and with the defaults for the others."""

    block: nn.Module
    graph: fx.Graph
    read: dict[str, Any]
    """The attributes that forward read, with their values."""
    _modules: list[nn.Module]
    _signature: inspect.Signature

    def function(self) -> Callable[..., Any]:
        """``graph`` as a function of the block and its tensors."""
        code = self.graph.python_code("self")
        namespace = dict(code.globals)
        exec(compile(code.src, f"<{type(self.block).__name__} fused>", "exec"), namespace)
        made: Callable[..., Any] = namespace["forward"]
        return made

    def tensors_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The tensors of a call as it was recorded; None for any other call."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        tensors = []
        for name, parameter in self._signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                if name in given:
                    return None
            elif parameter.default is not parameter.empty:
                if name in given and not _same(given[name], parameter.default):
                    return None
            elif isinstance(given[name], Tensor):
                tensors.append(given[name])
            else:
                return None
        return tensors

    def holds(self) -> bool:
        """Whether the block is as it was when it was recorded."""
        now = vars(self.block)
        return [*self.block.modules()] == self._modules and all(
            name in now and _same(now[name], value) for name, value in self.read.items()
        )


def record(block: nn.Module) -> BlockGraph:
    """Record the forward of a block, in training.

    Raises:
        Untraceable: it branches on a tensor, asks for the type of one, draws random numbers in
            Python, makes tensors of its own, sets attributes, or reads lists and the like; or
            torch.fx cannot follow it.
    """
    signature = inspect.signature(block.forward)
    names = _names_of_tensors(signature)
    try:
        graph, read = _run(block, names, ())
    except Untraceable:  # once more, with functions of the model's own file as they are
        helpers = _helpers(block)
        if not helpers:
            raise
        graph, read = _run(block, names, helpers)
    return BlockGraph(block, graph, read, [*block.modules()], signature)


def _run(
    block: nn.Module, names: Sequence[str], helpers: tuple[Callable[..., Any], ...]
) -> tuple[fx.Graph, dict[str, Any]]:
    read: dict[str, Any] = {}
    before = get_rng_state()
    try:
        graph = _Recorder(autowrap_functions=helpers).trace(_probe(block, names, read))
    except Untraceable:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise Untraceable(f"torch.fx: {first or type(error).__name__}") from error
    if get_rng_state() != before:
        raise Untraceable("its forward draws random numbers in Python")
    return graph, read


class _Value(fx.Proxy):
    """Stands for a tensor, and refuses to say what type it is: fx would say "no tensor"."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() reads it
        raise Untraceable("its forward asks for the type of a value")


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda value, other: value.tracer.create_proxy(
        "call_function", function, (value, other), {}
    )


# Without these, Python computes ``a += b`` as ``a = a + b``, and fx would record that.
for _function in IN_PLACE:
    setattr(_Value, f"__{_function.__name__}__", _in_place(_function))


class _Recorder(fx.Tracer):
    """Keeps every child a call, and refuses tensors that forward makes: they would be constants."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), fx.Proxy):
            return a.node
        if isinstance(a, nn.Module):
            return self.create_node("get_attr", self.path_of_module(a), (), {})
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            known = any(a is buffer for buffer in self.root.buffers())
            if not known:
                raise Untraceable("its forward makes a tensor of its own")
        return super().create_arg(a)


def _names_of_tensors(signature: inspect.Signature) -> list[str]:
    """The parameters without default."""
    names = []
    for name, parameter in signature.parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise Untraceable(f"its forward needs {name} by name")
            names.append(name)
    if not names:
        raise Untraceable("its forward takes no argument by position")
    return names


def _probe(block: nn.Module, names: Sequence[str], read: dict[str, Any]) -> nn.Module:
    """A shallow copy of the block that notes what its forward reads, and refuses that it writes."""
    kind = type(block)

    def getter(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name not in _OF_MODULES and name in object.__getattribute__(self, "__dict__"):
            if isinstance(value, list | dict | set):
                raise Untraceable(f"its forward reads self.{name}, which may change inside")
            read[name] = value
        return value

    def setter(self: Any, name: str, value: Any) -> None:
        raise Untraceable(f"its forward sets self.{name}")

    given = ", ".join(names)
    # Named parameters, because fx reads them; the globals, because fx looks for helpers there.
    source = f"lambda self, {given}: super(type(self), self).forward({given})"
    forward = eval(source, _code_of(block).__globals__)
    probe = copy.copy(block)
    probe.training = True
    members = {"forward": forward, "__getattribute__": getter, "__setattr__": setter}
    object.__setattr__(probe, "__class__", type(kind.__name__, (kind,), members))
    return probe


def _helpers(block: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The functions of Python that a forward calls by name."""
    function = _code_of(block)
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    return tuple(f for f in named if isinstance(f, FunctionType))


def _code_of(block: nn.Module) -> FunctionType:
    function = inspect.unwrap(type(block).forward)
    if not isinstance(function, FunctionType):
        raise Untraceable("its forward is no function of Python")
    return function


def _same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    plain = (bool, int, float, str, tuple)
    return type(now) is type(then) and isinstance(now, plain) and bool(now == then)
