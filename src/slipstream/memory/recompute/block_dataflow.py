"""Record in one forward how a model passes the output of each block to the next.

A block is *linked* to the block before it if each of its arguments is either a tensor that the
block before it returned (the same object, unchanged) or equals the argument that block was given.
Code between two blocks that computes something, such as a projection, that draws random numbers,
that writes into an argument, or that enters or leaves autocast breaks the link.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.memory.recompute.rng_state import Generator, get_rng_state, state_of
from slipstream.pytree import LEAVES, mapped, tensors

_COMPARED_BY_VALUE = (bool, int, float, str, torch.dtype, torch.device)
_DEPTH = 3
"""Containers in containers that are looked into for what a model changes between two blocks."""


Link = Mapping[int, int]
"""The arguments of a block that the block before it returned: for the position of each, the number
of the tensor in that output."""


class Call:
    """The arguments of one call of a module.

    Attributes:
        args: positional ones.
        kwargs: those by name.
        values: all of them, positional ones first.
        contents: the same, with what containers and objects hold at the time of the call.
        autocast: what autocast does at the time of the call.
        tensors: all tensors in them, nested ones included.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.values = (*args, *kwargs.values())
        # Seldom does a container hold tensors, and the descent takes longer.
        self._is_flat = all(map(_is_flat, self.values))
        self.tensors: list[torch.Tensor] = (
            [value for value in self.values if isinstance(value, torch.Tensor)]
            if self._is_flat
            else tensors((args, kwargs))
        )
        self.contents = self.values if self._is_flat else tuple(map(_contents, self.values))
        self.autocast = [
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in ("cpu", "cuda")
        ]

    @property
    def objects(self) -> list[object]:
        """Arguments with attributes, such as a configuration, that are neither tensors, modules nor
        classes; also those in containers."""
        return [] if self._is_flat else [one for value in self.values for one in _objects(value)]

    def has_form_of(self, other: Call) -> bool:
        """Whether both have as many positional arguments, and the same keywords in order, under
        the same autocast."""
        mine, its = ((len(c.args), [*c.kwargs], c.autocast) for c in (self, other))
        return mine == its

    def is_same(self, other: Call) -> bool:
        """Whether both have the same form and arguments."""
        return self.has_form_of(other) and all(map(is_same, self.contents, other.contents))

    def next_call(self, link: Link, output: Any) -> Call:
        """The call of the next block, from this call and its output."""
        returned, values = tensors(output), list(self.values)
        for position, number in link.items():
            values[position] = returned[number]
        return self._with_values(values)

    def with_tensors(self, replacements: Iterable[torch.Tensor]) -> Call:
        """The same call with its tensors replaced, in the order of `tensors`."""
        each = iter(replacements)
        if not self._is_flat:
            return Call(*mapped((self.args, self.kwargs), lambda _: next(each)))
        return self._with_values(
            [next(each) if isinstance(value, torch.Tensor) else value for value in self.values]
        )

    def _with_values(self, values: Sequence[Any]) -> Call:
        count = len(self.args)
        return Call(tuple(values[:count]), dict(zip(self.kwargs, values[count:], strict=True)))


def _is_flat(value: Any) -> bool:
    """Whether a value is a tensor or holds none: a plain one, or a tuple of plain ones."""
    if type(value) is tuple:
        return all(isinstance(v, LEAVES) and not isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, LEAVES)


def _objects(value: Any, depth: int = _DEPTH) -> Iterator[object]:
    if isinstance(value, dict | UserDict | list | tuple):
        held = value.values() if isinstance(value, dict | UserDict) else value
        for one in held if depth else ():
            yield from _objects(one, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, (*LEAVES, nn.Module, type)):
        yield value


def _contents(value: Any, depth: int = _DEPTH) -> Any:
    """Tuples of what a container or an object holds now, as it may hold other things later."""
    if isinstance(value, LEAVES) or not depth:
        return value
    if isinstance(value, dict | UserDict):
        return type(value), *(_contents(one, depth - 1) for one in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return type(value), *(_contents(one, depth - 1) for one in value)
    if isinstance(value, nn.Module):
        return value
    return value, *(
        _contents(one, min(depth, 2) - 1) for one in getattr(value, "__dict__", {}).values()
    )


class DataflowRecorder:
    """Records the calls of blocks, one after another.

    Args:
        own: generators that code between blocks may draw from, beside the global ones.

    Attributes:
        order: names of the blocks in the order in which they are called.
        links: by the name of a block, its link to the block called right before it.
    """

    def __init__(self, own: Sequence[Generator] = ()) -> None:
        self._own = own
        self.order: list[str] = []
        self.links: dict[str, Link] = {}
        self._last: tuple[Call, Any, list[int], tuple[Any, ...]] | None = None

    def before(self, name: str, call: Call) -> None:
        """Block ``name`` is about to run."""
        self.order.append(name)
        if link := self._link(call):
            self.links[name] = link

    def after(self, call: Call, output: Any) -> None:
        """The block has returned, which may have written into its arguments."""
        now = Call(call.args, call.kwargs)
        self._last = (now, output, versions(tensors(output)), self._rng_states())

    def _link(self, call: Call) -> Link | None:
        """The link from the last call to this one; None or empty if there is none."""
        if self._last is None:
            return None
        last, output, output_versions, rng_states = self._last
        if not call.has_form_of(last) or rng_states != self._rng_states():
            return None
        returned = tensors(output)
        outputs = {}
        contents = zip(call.contents, last.contents, strict=True)
        for position, (value, (held, last_held)) in enumerate(
            zip(call.values, contents, strict=True)
        ):
            numbers = [i for i, tensor in enumerate(returned) if tensor is value]
            if numbers and value._version == output_versions[numbers[0]]:
                outputs[position] = numbers[0]
            elif numbers or not is_same(held, last_held):
                return None
        return outputs

    def _rng_states(self) -> tuple[Any, ...]:
        """States of all generators that a forward may draw from."""
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        of_torch = (state.numpy().tobytes() for state in states)
        return get_rng_state(), *of_torch, *map(state_of, self._own)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Version counters of tensors, which operations in place increase."""
    return [tensor._version for tensor in tensors]


def is_same(value: Any, other: Any) -> bool:
    """Whether two arguments are one object, or equal plain values."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(is_same, value, other))
    return isinstance(value, _COMPARED_BY_VALUE) and value == other
