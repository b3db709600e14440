"""Small parameters of an optimizer, stepped together.

[Note: Blocks] An optimizer that torch does not fuse calls torch several times for each parameter,
and most parameters of a network are small: the calls take longer than the arithmetic. So while the
optimizer steps, its groups hold *blocks* in place of small parameters: many of them end to end.
The optimizer's class does not know, and one that treats every value on its own cannot tell. Values
and gradients are copied into the block, and values back, which is little, as they are small.

Large parameters stay as they are: cut into slices that fit the caches they were no faster.

Outside of a step everything is the user's: the parameters are in the groups, and the state of each
has its shape and its names (views of the blocks' state), so ``state_dict()`` needs no translation.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence, Set
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.codecs.compressor import is_dense
from slipstream.fusion.memory_in_common import PLAIN
from slipstream.fusion.stand_in import States
from slipstream.gradients.shards import flat
from slipstream.optim.elementwise import COUNTERS
from slipstream.optim.memory_order import laid_like

SMALL = {"cpu": 2**14}
"""Parameters of fewer values are put together, by device: calls cost more than copying them."""

LARGE = 2**20
"""The same for devices with launches."""

BLOCK = 2**18
"""Values of a block on a CPU: 1 MB, so what one operation leaves is in the cache for the next."""


class SmallParameters:
    """A group of an optimizer as it is stepped: blocks of its small parameters, and the others.

    Args:
        having: the parameters of the group that have a gradient.
        optimizer: has their states.
        shared: those that have memory in common with others, by identity: they stay as they are.
    """

    def __init__(self, having: Sequence[Tensor], optimizer: Optimizer, shared: Set[int]) -> None:
        self._having, self._shared = list(having), shared
        self._others: list[Tensor] = []
        small: dict[Hashable, list[Tensor]] = {}
        states = [optimizer.state.get(parameter, {}) for parameter in having]
        shaped = _shaped_names(having, states)
        for parameter, state in zip(having, states, strict=True):
            if _is_small(parameter) and id(parameter) not in shared:
                kinds = tuple(
                    (key, _kind(value, parameter, is_shaped=key in shaped, counts=key in COUNTERS))
                    for key, value in sorted(state.items())
                )
                kind = (parameter.dtype, parameter.device, _ones(parameter), kinds)
                small.setdefault(kind, []).append(parameter)
            else:
                self._others.append(parameter)
        self._blocks: list[_Block] = []
        for alike in small.values():
            if len(alike) > 1:
                self._blocks += [_Block(part, optimizer, shaped) for part in _parts(alike)]
            else:
                self._others += alike

    def fits(self, having: Sequence[Tensor], shared: Set[int]) -> bool:
        """Whether these are the parameters, and their states are what the last step left."""
        same = len(having) == len(self._having) and all(map(is_, having, self._having))
        return same and shared == self._shared and all(block.fits() for block in self._blocks)

    def begins(self, states: States) -> list[Tensor]:
        """Fill the blocks; what is to be stepped, of which ``states`` gets the states."""
        for block in self._blocks:
            block.begins(states)
        return [*self._others, *(block.values for block in self._blocks)]

    def ends(self, states: States) -> None:
        """Give values and states to the parameters, and take those of blocks out of ``states``."""
        for block in self._blocks:
            block.ends(states)

    def part(self) -> None:
        """Give each parameter a state of its own, for what comes after these blocks."""
        for block in self._blocks:
            block.part()


class _Block:
    """Small parameters of one kind, end to end.

    Args:
        parameters: at least two.
        optimizer: has their states, which become views of the block's.
        shaped: names of the states that have one value for each of a parameter's.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optimizer: Optimizer, shaped: Container[str]
    ) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        total = sum(p.numel() for p in parameters)
        ones = _ones(parameters[0])
        self.values = parameters[0].detach().new_empty(total).view(*ones, total)
        self._layouts = [*map(_layout, parameters)]
        self._orders = [(p.stride(), p.is_contiguous()) for p in parameters]
        self._places = self._views(self.values)
        self._state: dict[str, Any] = {}
        self._whole: dict[str, Tensor] = {}  # what the parameters' states are views of
        self._versions: dict[str, int] = {}  # of these, where they hold numbers
        self._shown: dict[str, Sequence[Any]] = {}  # the parameters' states, by name
        self._pointers: dict[str, list[int]] = {}  # where their memory was
        self._adopt(shaped)

    def fits(self) -> bool:
        """Whether the parameters are laid out as they were, and have the states that they were
        given."""
        find, length = self._optimizer.state.get, len(self._shown)
        states = [find(p, {}) for p in self._parameters]
        return (
            all(len(state) == length for state in states)
            and all(
                all(map(is_, [state.get(key) for state in states], values))
                for key, values in self._shown.items()
            )
            and all(
                [value.data_ptr() for value in self._shown[key]] == pointers
                for key, pointers in self._pointers.items()
            )
            and self._layouts == [*map(_layout, self._parameters)]
            and all(map(has_plain_gradient, self._parameters))
            and all(map(self._fits_number, self._versions))
        )

    def _fits_number(self, key: str) -> bool:
        """Whether nobody has written to the numbers of the parameters."""
        each, number = self._whole[key], self._state[key]
        if each._version != self._versions[key]:
            return False
        return not each.is_cpu or torch.equal(each, number.expand_as(each))  # ``.data`` has none

    def begins(self, states: States) -> None:
        """Copy values and gradients in."""
        torch._foreach_copy_(self._places, list(self._parameters))
        gradients = [gradient_of(p) for p in self._parameters]
        parts = [
            g.view(-1) if (g.stride(), True) == order else flat(laid_like(g, place))
            for g, order, place in zip(gradients, self._orders, self._places, strict=True)
        ]
        gradient = torch.cat(parts).view_as(self.values)
        self.values.grad, self._gradient = gradient, (gradient, gradient._version)
        if self._state:
            states[self.values] = self._state

    def ends(self, states: States) -> None:
        """Copy values out, and show the parameters their states."""
        if self.values.data_ptr() != self._places[0].data_ptr():  # the class has set ``data``
            self.values.data = self.values.data.contiguous()
            self._places = self._views(self.values)
        torch._foreach_copy_(list(self._parameters), self._places)
        self._return_gradients()
        if self.values in states:
            self._state = states.pop(self.values)
            self._show()

    def part(self) -> None:
        """Give each parameter a state of its own."""
        for key, values in self._shown.items():
            for parameter, value in zip(self._parameters, values, strict=True):
                state = self._optimizer.state.get(parameter, {})
                if isinstance(value, Tensor) and state.get(key) is value:
                    state[key] = value.clone()

    def _return_gradients(self) -> None:
        """A class may drop gradients in its step, or change them."""
        gradient, self.values.grad = self.values.grad, None
        if gradient is None:
            for parameter in self._parameters:
                parameter.grad = None
        elif gradient is not self._gradient[0] or gradient._version != self._gradient[1]:
            for parameter, changed in zip(
                self._parameters, self._views(gradient.contiguous()), strict=True
            ):
                theirs = gradient_of(parameter)
                if is_dense(theirs):
                    theirs.copy_(changed)
                else:  # expanded from fewer values
                    parameter.grad = changed.clone()

    def _adopt(self, shaped: Container[str]) -> None:
        """Go on from the states that the parameters have."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        for key, value in states[0].items():
            if key in shaped and isinstance(value, Tensor):
                whole = torch.empty_like(self.values, dtype=value.dtype)
                torch._foreach_copy_(self._views(whole), [state[key] for state in states])
                self._state[key] = whole
            else:
                self._state[key] = value.clone() if isinstance(value, Tensor) else value
        self._show()

    def _show(self) -> None:
        """Give each parameter its part of every state, or a number of its own."""
        for key in [*self._shown]:
            if key not in self._state:
                self._drop(key)
        for key, value in self._state.items():
            parts: Sequence[Any] = []
            if isinstance(value, Tensor):
                parts = self._parts_of(key, value)
            elif value is not self._shown.get(key, [None])[0]:
                parts = [value] * len(self._parameters)
            if parts:
                self._shown[key] = parts
                if isinstance(value, Tensor):
                    self._pointers[key] = [part.data_ptr() for part in parts]
                for parameter, part in zip(self._parameters, parts, strict=True):
                    self._optimizer.state[parameter][key] = part

    def _parts_of(self, key: str, value: Tensor) -> Sequence[Tensor]:
        """Cut a state into the parameters' parts; nothing where they already see it up to date."""
        whole = self._whole.get(key)
        if value.shape == self.values.shape:
            if value is whole:
                return []
            if whole is not None and _alike(whole, value):
                self._state[key] = whole.copy_(value)
                return []
            self._state[key] = self._whole[key] = value = value.contiguous()
            return self._views(value)
        each = value.expand(len(self._parameters), *value.shape)
        if whole is not None and _alike(whole, each):
            whole.copy_(each)
            self._versions[key] = whole._version
            return []
        self._whole[key] = each = each.clone()
        self._versions[key] = each._version
        return each.unbind()

    def _drop(self, key: str) -> None:
        """A state that the optimizer's class has taken away."""
        for kept in (self._shown, self._pointers, self._whole, self._versions):
            kept.pop(key, None)
        for parameter in self._parameters:
            del self._optimizer.state[parameter][key]

    def _views(self, whole: Tensor) -> list[Tensor]:
        """The part of each parameter, laid out as it was."""
        views, start = [], whole.storage_offset()
        for (*_, shape), (stride, _) in zip(self._layouts, self._orders, strict=True):
            views.append(whole.as_strided(shape, stride, start))
            start += shape.numel()
        return views


def _parts(alike: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of at least two parameters, on a CPU short enough for the caches."""
    part: list[Tensor] = []
    for number, parameter in enumerate(alike):
        part.append(parameter)
        full = parameter.device.type == "cpu" and sum(p.numel() for p in part) >= BLOCK
        if full and len(part) > 1 and number < len(alike) - 2:
            yield part
            part = []
    yield part


def _ones(parameter: Tensor) -> tuple[int, ...]:
    """Axes before that of the values: some optimizers treat vectors unlike matrices."""
    return (1,) * (min(parameter.ndim, 2) - 1)


def _is_small(parameter: Tensor) -> bool:
    size = SMALL.get(parameter.device.type, LARGE)
    dense = parameter.numel() < size and type(parameter) in PLAIN and is_dense(parameter)
    return dense and has_plain_gradient(parameter)


def has_plain_gradient(parameter: Tensor) -> bool:
    """Whether the gradient has a value for each of the parameter's, of the same type."""
    gradient = gradient_of(parameter)
    return gradient.layout is torch.strided and gradient.dtype is parameter.dtype


def _layout(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return parameter.dtype, parameter.device, parameter.shape


def gradient_of(parameter: Tensor) -> Tensor:
    """Gradient of a parameter that has one."""
    assert parameter.grad is not None  # others are left out
    return parameter.grad


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether one can be copied to the other without a change."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _shaped_names(
    parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> frozenset[str]:
    """States with one value for each of a parameter's. Those of a parameter of one value look like
    numbers, so others tell."""
    both = zip(parameters, states, strict=True)
    return frozenset(
        key
        for parameter, state in both
        if parameter.numel() > 1
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _kind(value: Any, parameter: Tensor, *, is_shaped: bool, counts: bool) -> Hashable:
    """Equal for states that can be one state of a block: the type of values, or a number."""
    if not isinstance(value, Tensor):
        return (type(value), value if isinstance(value, Hashable) else id(value))
    beside = value.layout is torch.strided and value.device == parameter.device
    if is_shaped:
        return value.dtype if beside and value.shape == parameter.shape else id(value)
    if value.numel() == 1 and (parameter.numel() != 1 or counts):
        return (value.dtype, value.device, value.shape, value.item())
    return id(value)
