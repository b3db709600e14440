"""The operations of one module's own ``forward``, with its children as they are.

``torch.fx`` records a forward by running it once with stand-ins for tensors. The record says where
chains are to be expected and is never run itself, so it may grow stale. A forward that cannot be
recorded, or that leaves traces, is not looked into.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from slipstream.fusion.settings import OF_MODULES
from slipstream.memory.recompute.rng_state import get_rng_state, set_rng_state


class Untraceable(Exception):
    """A forward that cannot be recorded; says why."""


def record(block: nn.Module) -> fx.Graph:
    """Record the forward of a block, in training; random states stay as they were.

    Raises:
        Untraceable: it branches on a tensor, asks for the type of one, makes tensors of its own,
            sets attributes, or reads lists and the like; or torch.fx cannot follow it.
    """
    names = _names_of_tensors(inspect.signature(block.forward))
    try:
        return _run(block, names, ())
    except Untraceable:  # once more, with functions of the model's own file as they are
        helpers = _helpers(block)
        if not helpers:
            raise
        return _run(block, names, helpers)


def _run(
    block: nn.Module, names: Sequence[str], helpers: tuple[Callable[..., Any], ...]
) -> fx.Graph:
    before = get_rng_state()
    try:
        with torch.random.fork_rng(_devices_of(block)):
            return _Recorder(autowrap_functions=helpers).trace(_probe(block, names))
    except Untraceable:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise Untraceable(f"torch.fx: {first or type(error).__name__}") from error
    finally:
        if get_rng_state() != before:
            set_rng_state(before)


def _devices_of(block: nn.Module) -> list[torch.device]:
    return list({p.device for p in block.parameters() if p.device.type == "cuda"})


class _Value(fx.Proxy):
    """Stands for a tensor, and refuses to say what type it is: fx would say "no tensor"."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() reads it
        raise Untraceable("its forward asks for the type of a value")

    def __iadd__(self, other: Any) -> fx.Proxy:
        """Record ``a += b``, which Python else computes as ``a = a + b``."""
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


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


def _probe(block: nn.Module, names: Sequence[str]) -> nn.Module:
    """A shallow copy of the block that refuses that its forward changes it."""
    kind = type(block)

    def getter(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        own = name not in OF_MODULES and name in object.__getattribute__(self, "__dict__")
        if own and isinstance(value, list | dict | set):
            raise Untraceable(f"its forward reads self.{name}, which it may change")
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
