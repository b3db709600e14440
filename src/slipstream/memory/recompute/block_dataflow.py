"""How a model hands on what one block returns to the next; observed in one forward.

A block is *linked* to the one before it if each of its arguments is either what that one returned
(the very object) or what that one was given. Glue between them, such as a projection, breaks the
link, and so do random numbers that are drawn there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.memory.recompute import rng_state
from slipstream.pytree import mapped, tensors

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Call:
    """The arguments of a module: positional ones first, then by name.

    Attributes:
        values: all of them.
        names: of the last of them.
    """

    values: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call with these arguments."""
        return cls((*args, *kwargs.values()), tuple(kwargs))

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional ones."""
        return self.values[: len(self.values) - len(self.names)]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Those by name."""
        first = len(self.values) - len(self.names)
        return dict(zip(self.names, self.values[first:], strict=True))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those among the values, and in their tuples, lists and mappings."""
        return tensors(self.values)

    def of_tensors(self, found: Iterable[torch.Tensor]) -> Call:
        """The same call of other tensors, in copies of what these are in."""
        each = iter(found)
        return Call(mapped(self.values, lambda _: next(each)), self.names)


@dataclass(frozen=True)
class Link:
    """Which arguments of a block are among the tensors that the one before it returned: their
    numbers by place.
    """

    outputs: Mapping[int, int]

    def call(self, before: Call, output: Any) -> Call:
        """The call of the block, from that of the one before it and what that returned."""
        found = tensors(output)
        values = list(before.values)
        for place, number in self.outputs.items():
            values[place] = found[number]
        return Call(tuple(values), before.names)


class Observer:
    """Sees the calls of blocks, one after another.

    Attributes:
        order: names of the blocks, as they were called; only the first call of each counts.
        links: by the name of a block, to the one called right before it.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.links: dict[str, Link] = {}
        self._last: tuple[Call, Any, list[int], tuple[Any, ...]] | None = None

    def before(self, name: str, call: Call) -> None:
        """``name`` is about to run."""
        self.order.append(name)
        link = self._link(call)
        if link is not None:
            self.links[name] = link

    def after(self, call: Call, output: Any) -> None:
        """It has run."""
        self._last = (call, output, versions(tensors(output)), _random_state())

    def forget(self) -> None:
        """The pass is over: let its tensors go."""
        self._last = None

    def _link(self, call: Call) -> Link | None:
        """What links a call to the one before it."""
        if self._last is None:
            return None
        before, output, unchanged, state = self._last
        same_form = call.names == before.names and len(call.values) == len(before.values)
        if not same_form or state != _random_state():
            return None
        found = tensors(output)
        outputs = {}
        for place, (value, given) in enumerate(zip(call.values, before.values, strict=True)):
            numbers = [i for i, o in enumerate(found) if o is value]
            if numbers and value._version == unchanged[numbers[0]]:
                outputs[place] = numbers[0]
            elif numbers or not same(value, given):
                return None
        return Link(outputs) if outputs else None


def versions(found: Iterable[torch.Tensor]) -> list[int]:
    """How often tensors were changed in place."""
    return [tensor._version for tensor in found]


def same(value: Any, other: Any) -> bool:
    """Whether two arguments are one object, or equal values."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(same, value, other))
    return isinstance(value, _PLAIN) and value == other


def _random_state() -> tuple[Any, ...]:
    """Of all generators that a forward may draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return rng_state.state(), *(state.numpy().tobytes() for state in states)
