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

from collections.abc import Hashable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.codecs.compressor import is_dense
from slipstream.fusion.stand_in import States
from slipstream.gradients.shares import flat
from slipstream.optim.elementwise import COUNTERS
from slipstream.optim.memory_order import laid_like

SMALL = {"cpu": 2**14}
"""Parameters of fewer values are put together, by device: calls cost more than copying them."""

PLAIN = (Tensor, nn.Parameter)
"""Types of parameters whose memory is known; subclasses may have any."""

LARGE = 2**20
"""The same for devices with launches."""

BLOCK = 2**18
"""Values of a block on a CPU: 1 MB, so what one operation leaves is in the cache for the next."""


class SmallParameters:
    """What a group of an optimizer is stepped as: blocks of its small parameters, and the others.

    Args:
        having: the parameters of the group that have a gradient.
        optimizer: has their states.
    """

    def __init__(self, having: Sequence[Tensor], optimizer: Optimizer) -> None:
        self._having = list(having)
        self._pointers = _pointers(having)
        self._others: list[Tensor] = []
        small: dict[Hashable, list[Tensor]] = {}
        shared = _sharing_memory(having)
        for parameter in having:
            if _is_small(parameter) and id(parameter) not in shared:
                numbers = _numbers(optimizer.state.get(parameter, {}), parameter)
                kind = (parameter.dtype, parameter.device, _ones(parameter), numbers)
                small.setdefault(kind, []).append(parameter)
            else:
                self._others.append(parameter)
        self._blocks: list[_Block] = []
        for alike in small.values():
            if len(alike) > 1:
                self._blocks += [_Block(part, optimizer) for part in _parts(alike)]
            else:
                self._others += alike

    def fits(self, having: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, and their states are what the last step left."""
        if len(having) != len(self._having) or not all(map(is_, having, self._having)):
            return False
        pointers = _pointers(having)
        if pointers != self._pointers:
            if _sharing_memory(having):
                return False
            self._pointers = pointers
        return all(block.fits() for block in self._blocks)

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
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        total = sum(p.numel() for p in parameters)
        ones = _ones(parameters[0])
        self.values = parameters[0].detach().new_empty(total).view(*ones, total)
        self._layouts = [*map(_layout, parameters)]
        self._places = self._views(self.values)
        self._state: dict[str, Any] = {}
        self._whole: dict[str, Tensor] = {}  # what the parameters' states are views of
        self._versions: dict[str, int] = {}  # of these, where they hold numbers
        self._shown: list[dict[str, Any]] = [{} for _ in parameters]  # the state of each
        self._adopt()

    def fits(self) -> bool:
        """Whether the parameters are laid out as they were, and have the states that they were
        given."""
        states = self._optimizer.state
        for parameter, layout, shown in zip(
            self._parameters, self._layouts, self._shown, strict=True
        ):
            state = states.get(parameter, {})
            if _layout(parameter) != layout or len(state) != len(shown):
                return False
            if not has_plain_gradient(parameter):
                return False
            for key, value in shown.items():
                if state.get(key) is not value:
                    return False
        numbers_fit = all(map(self._fits_number, self._versions))
        return numbers_fit and self._pointers == [v.data_ptr() for v in self._tensors]

    def _fits_number(self, key: str) -> bool:
        """Whether nobody has written to the numbers of the parameters."""
        each, number = self._whole[key], self._state[key]
        if each._version != self._versions[key]:
            return False
        return not each.is_cpu or torch.equal(each, number.expand_as(each))  # ``.data`` has none

    def begins(self, states: States) -> None:
        """Copy values and gradients in."""
        torch._foreach_copy_(self._places, [p.detach() for p in self._parameters])
        gradients = [flat(laid_like(gradient_of(p), p)) for p in self._parameters]
        gradient = torch.cat(gradients).view_as(self.values)
        self.values.grad, self._gradient = gradient, (gradient, gradient._version)
        if self._state:
            states[self.values] = self._state

    def ends(self, states: States) -> None:
        """Copy values out, and show the parameters their states."""
        torch._foreach_copy_([p.detach() for p in self._parameters], self._places)
        self._return_gradients()
        if self.values in states:
            self._state = states.pop(self.values)
            self._show()

    def part(self) -> None:
        """Give each parameter a state of its own."""
        for parameter, shown in zip(self._parameters, self._shown, strict=True):
            state = self._optimizer.state.get(parameter, {})
            for key, value in shown.items():
                if isinstance(value, Tensor) and state.get(key) is value:
                    state[key] = value.clone()

    def _return_gradients(self) -> None:
        """A class may drop gradients in its step, or change them."""
        gradient, self.values.grad = self.values.grad, None
        if gradient is None:
            for parameter in self._parameters:
                parameter.grad = None
        elif gradient is not self._gradient[0] or gradient._version != self._gradient[1]:
            theirs = [gradient_of(p).detach() for p in self._parameters]
            torch._foreach_copy_(theirs, self._views(gradient.contiguous()))

    def _adopt(self) -> None:
        """Go on from the states that the parameters have."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        for key, value in states[0].items():
            if _is_shaped(key, value, self._parameters[0]):
                whole = torch.empty_like(self.values, dtype=value.dtype)
                torch._foreach_copy_(self._views(whole), [state[key] for state in states])
                self._state[key] = whole
            else:
                self._state[key] = value.clone() if isinstance(value, Tensor) else value
        self._show()

    def _show(self) -> None:
        """Give each parameter its part of every state, or a number of its own."""
        for key in [*self._shown[0]]:
            if key not in self._state:
                self._drop(key)
        for key, value in self._state.items():
            if isinstance(value, Tensor):
                parts = self._parts_of(key, value)
            else:
                parts = [] if value is self._shown[0].get(key) else [value] * len(self._shown)
            if parts:
                for parameter, shown, part in zip(
                    self._parameters, self._shown, parts, strict=True
                ):
                    shown[key] = self._optimizer.state[parameter][key] = part
        self._tensors = [v for shown in self._shown for v in shown.values() if _is_tensor(v)]
        self._pointers = [value.data_ptr() for value in self._tensors]

    def _parts_of(self, key: str, value: Tensor) -> Sequence[Tensor]:
        """What the parameters are to be shown of a state; nothing: what they see is up to date."""
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
        self._whole.pop(key, None)
        self._versions.pop(key, None)
        for parameter, shown in zip(self._parameters, self._shown, strict=True):
            del shown[key], self._optimizer.state[parameter][key]

    def _views(self, whole: Tensor) -> list[Tensor]:
        """The part of each parameter, laid out like it."""
        views, start = [], whole.storage_offset()
        for parameter in self._parameters:
            views.append(whole.as_strided(parameter.size(), parameter.stride(), start))
            start += parameter.numel()
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


def _layout(parameter: Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _pointers(parameters: Sequence[Tensor]) -> list[int]:
    return [p.data_ptr() for p in parameters if type(p) in PLAIN]


def _sharing_memory(parameters: Sequence[Tensor]) -> set[int]:
    """Which of them, by identity, have values in memory of another: a step of the one counts for
    the other's, so they are stepped in their order."""
    spans = []
    for parameter in parameters:
        if type(parameter) in PLAIN and parameter.numel():
            last = sum(
                (n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            spans.append((start, start + (last + 1) * parameter.itemsize, id(parameter)))
    shared, reach, holder = set[int](), 0, 0
    for start, end, number in sorted(spans):
        if start < reach:
            shared |= {number, holder}
        if end > reach:
            reach, holder = end, number
    return shared


def gradient_of(parameter: Tensor) -> Tensor:
    """Of a parameter that has one."""
    assert parameter.grad is not None  # others are left out
    return parameter.grad


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether one can be copied to the other without a change."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _is_shaped(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state has one value for each of the parameter's."""
    shaped = isinstance(value, Tensor) and value.shape == parameter.shape
    return shaped and (parameter.ndim > 0 or key not in COUNTERS)


def _numbers(state: dict[str, Any], parameter: Tensor) -> Hashable:
    """The names and types of a parameter's states, and the values of those that are one number."""
    return tuple((key, _number(key, value, parameter)) for key, value in sorted(state.items()))


def _number(key: str, value: Any, parameter: Tensor) -> Hashable:
    if not isinstance(value, Tensor):
        return (type(value), value if isinstance(value, Hashable) else id(value))
    beside = value.layout is torch.strided and value.device == parameter.device
    if beside and _is_shaped(key, value, parameter):
        return value.dtype
    if value.numel() == 1:
        return (value.dtype, value.device, value.shape, value.item())
    return id(value)
