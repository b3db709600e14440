"""How a model hands on what one block returns to the next; observed in one forward.

A block is *linked* to the one before it if each of its arguments is either what that one returned
(the very object) or what that one was given. Glue between them, such as a projection, breaks the
link, and so do random numbers that are drawn there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True)
class Link:
    """Which arguments of a block are outputs of the block before it: their numbers by place."""

    outputs: Mapping[int, int]

    def call(self, before: Call, output: Any) -> Call:
        """The call of the block, from that of the one before it and what that returned."""
        found = elements(output)
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
        self._last: tuple[Call, Any, list[int], torch.Tensor] | None = None

    def before(self, name: str, call: Call) -> None:
        """``name`` is about to run."""
        self.order.append(name)
        link = self._link(call)
        if link is not None:
            self.links[name] = link

    def after(self, call: Call, output: Any) -> None:
        """It has run."""
        versions = [_version(value) for value in elements(output)]
        self._last = (call, output, versions, _random_state())

    def forget(self) -> None:
        """The pass is over: let its tensors go."""
        self._last = None

    def _link(self, call: Call) -> Link | None:
        """What links a call to the one before it."""
        if self._last is None:
            return None
        before, output, versions, state = self._last
        same_form = call.names == before.names and len(call.values) == len(before.values)
        if not same_form or not torch.equal(state, _random_state()):
            return None
        found = elements(output)
        outputs = {}
        for place, (value, given) in enumerate(zip(call.values, before.values, strict=True)):
            numbers = [i for i, o in enumerate(found) if o is value and _is_tensor(value)]
            if numbers and _version(value) == versions[numbers[0]]:
                outputs[place] = numbers[0]
            elif numbers or not same(value, given):
                return None
        return Link(outputs) if outputs else None


def elements(output: Any) -> list[Any]:
    """What a module returned, one by one."""
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]


def same(value: Any, other: Any) -> bool:
    """Whether two arguments are one object, or equal values."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(same, value, other))
    return isinstance(value, _PLAIN) and value == other


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _version(value: Any) -> int:
    """How often a tensor was changed in place."""
    return value._version if isinstance(value, torch.Tensor) else 0


def _random_state() -> torch.Tensor:
    """Of all streams that a forward may draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)
