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
from torch import Tensor
from torch.optim import Optimizer

from slipstream.codecs.compressor import is_dense
from slipstream.gradients.shares import flat
from slipstream.optim.elementwise import COUNTERS

SMALL = {"cpu": 2**14}
"""Parameters of fewer values are put together, by device: calls cost more than copying them."""

LARGE = 2**20
"""The same for devices with launches."""

BLOCK = 2**18
"""Values of a block on a CPU: 1 MB, so what one operation leaves is in the cache for the next."""


class SmallParameters:
    """A group of an optimizer: blocks of its small parameters, and the others.

    Args:
        settings: of the group.
        having: its parameters that have a gradient.
        optimizer: has their states.
    """

    def __init__(
        self, settings: dict[str, Any], having: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        self._settings, self._optimizer = settings, optimizer
        self._having = list(having)
        self._users: list[Tensor] | None = None  # while the optimizer steps
        self._others: list[Tensor] = []
        small: dict[Hashable, list[Tensor]] = {}
        for parameter in having:
            if _is_small(parameter):
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
        """Whether these are the parameters, and their states are where they were."""
        same = len(having) == len(self._having) and all(map(is_, having, self._having))
        return same and all(block.fits() for block in self._blocks)

    def begins(self) -> int:
        """Put the blocks in the place of their parameters; how many calls that makes."""
        for block in self._blocks:
            block.begins()
        self._users = self._settings["params"]
        self._settings["params"] = [*self._others, *(block.values for block in self._blocks)]
        return len(self._settings["params"])

    def ends(self) -> None:
        """Give values and states to the parameters, if this step had blocks."""
        if self._users is not None:
            for block in self._blocks:
                block.ends()

    def leave(self) -> None:
        """Put the parameters back; idempotent."""
        for block in self._blocks:
            block.leave()
        if self._users is not None:
            self._settings["params"], self._users = self._users, None

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
        self._places = self._views(self.values)
        self._state: dict[str, Any] = {}
        self._whole: dict[str, Tensor] = {}
        self._shown: dict[str, list[Tensor]] = {}  # the part of each parameter, a view
        self._adopt()

    def fits(self) -> bool:
        """Whether the parameters are laid out as they were, and have the states that they were
        given."""
        for number, (parameter, place) in enumerate(
            zip(self._parameters, self._places, strict=True)
        ):
            state = self._optimizer.state.get(parameter, {})
            same = parameter.dtype is place.dtype and parameter.stride() == place.stride()
            if not same or not lies_like_its_gradient(parameter) or len(state) != len(self._state):
                return False
            for key, value in state.items():
                shown = self._shown.get(key)
                if shown is None:
                    if value != self._state.get(key):
                        return False
                elif value is not shown[number]:
                    return False
        return True

    def begins(self) -> None:
        """Copy values and gradients in."""
        torch._foreach_copy_(self._places, [p.detach() for p in self._parameters])
        gradients = torch.cat([_in_memory_order(gradient_of(p)) for p in self._parameters])
        self.values.grad = gradients.view_as(self.values)
        self._optimizer.state[self.values] = self._state

    def ends(self) -> None:
        """Copy values out, and show the parameters their states."""
        torch._foreach_copy_([p.detach() for p in self._parameters], self._places)
        for key, value in self._state.items():
            whole = self._whole.get(key)
            if not isinstance(value, Tensor):
                for parameter in self._parameters:
                    self._optimizer.state[parameter][key] = value
            elif whole is None:
                self._show(key, value)
            elif value.shape != self.values.shape:
                whole.copy_(value)  # every parameter has a number of its own, which it may count
            elif value is not whole:
                self._state[key] = whole.copy_(value)

    def leave(self) -> None:
        """Take the block out of the optimizer; idempotent."""
        self._optimizer.state.pop(self.values, None)
        self.values.grad = None

    def part(self) -> None:
        """Give each parameter a state of its own."""
        for number, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter, {})
            for key, shown in self._shown.items():
                if state.get(key) is shown[number]:
                    state[key] = shown[number].clone()

    def _adopt(self) -> None:
        """Go on from the states that the parameters have."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        for key, value in states[0].items():
            if _is_shaped(key, value, self._parameters[0]):
                whole = torch.empty_like(self.values, dtype=value.dtype)
                torch._foreach_copy_(self._views(whole), [state[key] for state in states])
                self._state[key] = whole
                self._show(key, whole)
            elif isinstance(value, Tensor):
                self._state[key] = value.clone()
                self._show(key, value)
            else:
                self._state[key] = value

    def _show(self, key: str, value: Tensor) -> None:
        """Give each parameter its part of a state, or a number of its own."""
        if value.shape == self.values.shape:
            self._whole[key], self._shown[key] = value, self._views(value)
        else:
            count = len(self._parameters)
            each = value.expand(count, *value.shape).clone()
            self._whole[key], self._shown[key] = each, list(each.unbind())
        for parameter, shown in zip(self._parameters, self._shown[key], strict=True):
            self._optimizer.state[parameter][key] = shown

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
    return parameter.numel() < size and is_dense(parameter) and lies_like_its_gradient(parameter)


def lies_like_its_gradient(parameter: Tensor) -> bool:
    """Whether the gradient has its values in the order of the parameter's."""
    gradient = gradient_of(parameter)
    return (
        gradient.layout is torch.strided
        and gradient.dtype is parameter.dtype
        and (gradient.stride() == parameter.stride() or _same_order(gradient, parameter))
    )


def _same_order(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether strides differ at most along axes of length 1, where they mean nothing."""
    both = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(length == 1 or one == other for length, one, other in both)


def gradient_of(parameter: Tensor) -> Tensor:
    """Of a parameter that has one."""
    assert parameter.grad is not None  # others are left out
    return parameter.grad


def _in_memory_order(gradient: Tensor) -> Tensor:
    return gradient.view(-1) if gradient.is_contiguous() else flat(gradient)


def _is_shaped(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state has one value for each of the parameter's."""
    shaped = isinstance(value, Tensor) and value.shape == parameter.shape
    return shaped and (parameter.ndim > 0 or key not in COUNTERS)


def _numbers(state: dict[str, Any], parameter: Tensor) -> Hashable:
    """The names of a parameter's states, and the values of those that are one number."""
    return tuple(
        (key, None if _is_shaped(key, value, parameter) else _number(value))
        for key, value in sorted(state.items())
    )


def _number(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else id(value)
    return value if isinstance(value, Hashable) else id(value)
