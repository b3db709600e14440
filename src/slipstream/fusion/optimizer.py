"""The user's optimizer in few calls: torch's fused form, or blocks that fit the caches.

[Note: Blocks] An optimizer that torch does not fuse makes several passes over each parameter, its
gradient and its state, with a call for each of them. Small parameters cost calls, large ones cost
passes through memory. So while the optimizer steps, its groups hold *blocks* in place of the user's
parameters: slices of a large parameter, or many small ones laid end to end, each of a size whose
later passes find everything in the caches. The optimizer's class does not know, and one that treats
every value on its own cannot tell. Slices are views. Small parameters and their gradients are
copied into their block, and the parameters back; they are few values, for else they would be large.

Outside of a step everything is the user's: the parameters are in the groups, and the state of each
has its shape and its names (views of the blocks' state), so ``state_dict()`` needs no translation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.codecs.compressor import is_dense
from slipstream.errors import ModelError
from slipstream.gradients.shares import flat
from slipstream.optim.elementwise import COUNTERS, ELEMENTWISE, is_elementwise
from slipstream.optim.layerwise import Layerwise
from slipstream.strategy import Row

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Classes that torch updates in one call."""

BLOCK = {"cpu": 2**18}
"""Values of a block, by device: 1 MB, so what one operation leaves is in the cache for the next."""

LARGE = 2**20
"""Elsewhere a parameter of so many values stays as it is: there launches count, not passes."""


def fuse_optimizer(optimizer: Optimizer, *, elementwise: bool = False) -> FusedOptimizer:
    """Make a step of ``optimizer`` few calls, until ``close()`` of the result.

    - SGD, Adam, AdamW, Adagrad: torch's fused form, one call for each group.
    - other optimizers of torch that treat every value on its own, and those that
      ``elementwise`` vouches for: blocks, see the note of this module.
    - Lars and Lamb already step all parameters together.

    The optimizer stays the user's: groups, schedulers, ``state_dict()`` and ``load_state_dict()``
    are as before. A step with a closure, sparse gradients and parameters with holes in their memory
    are stepped as they are.

    Args:
        optimizer: torch's, or of a class of the user's own.
        elementwise: its class treats every value of a parameter on its own.

    Exactness: reordered: each value is computed by the same operations, but vectorized, and torch's
    fused kernels contract some of them.

    Raises:
        ModelError: an optimizer that neither torch nor blocks can fuse.

    Example:
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(8)]
        >>> parameters = [p for layer in layers for p in layer.parameters()]
        >>> optimizer = torch.optim.RMSprop(parameters, lr=0.01)
        >>> fused = fuse_optimizer(optimizer)
        >>> for p in parameters:
        ...     p.grad = torch.ones_like(p)
        >>> optimizer.step()
        >>> fused.report_rows()[0].value
        '16 RMSprop updates -> 2'
        >>> optimizer.state[parameters[0]]["square_avg"].shape
        torch.Size([4, 4])
        >>> fused.close()

    Source: the fused momentum of Paddle's Fleet; horizontally fused optimizers of NVIDIA Apex.
    """
    fused = FusedOptimizer(optimizer, elementwise=elementwise)
    fused.attach()
    return fused


class FusedOptimizer:
    """An optimizer whose steps are few calls; made by `fuse_optimizer`.

    Other hooks of a step may exchange the ``data`` of parameters for the time of it: this one is
    made before theirs and attached after them, so it works inside.
    """

    def __init__(self, optimizer: Optimizer, *, elementwise: bool = False) -> None:
        self._optimizer, self._form = optimizer, _form(optimizer, elementwise)
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._runs: dict[int, _Group] = {}  # by the number of the group
        self._updates = self._calls = 0
        self._hooks = [optimizer.register_step_post_hook(self._ends)]

    def attach(self) -> None:
        """From now on steps are fused."""
        optimizer = self._optimizer
        self._hooks += [
            optimizer.register_step_pre_hook(self._begins),
            optimizer.register_state_dict_pre_hook(self._restore),  # a step may have raised
        ]

    def close(self) -> None:
        """Leave the optimizer as it was; idempotent."""
        self._restore()
        while self._hooks:
            self._hooks.pop().remove()
        for group in self._runs.values():
            group.part()
        self._runs.clear()

    def report_rows(self) -> list[Row]:
        """How many updates became how many calls."""
        name = type(self._optimizer).__name__
        count = self._updates or sum(len(g["params"]) for g in self._optimizer.param_groups)
        calls = str(self._calls) if self._calls else "few, counted in the first step"
        return [Row("optimizer", f"{count} {name} updates -> {calls}", self._form)]

    def _begins(self, optimizer: object, args: Any, kwargs: Any) -> None:
        self._restore()
        closure = [x for x in (*args[1:], *kwargs.values()) if x is not None]
        if closure:
            return  # the gradients are those that the closure will compute
        self._updates = self._calls = 0
        for number, group in enumerate(self._optimizer.param_groups):
            if having := [p for p in group["params"] if p.grad is not None]:
                self._updates += len(having)
                self._calls += self._fuse(number, group, having)

    def _fuse(self, number: int, group: dict[str, Any], having: Sequence[Tensor]) -> int:
        """Prepare a group for this step; how many calls it will take."""
        if self._form == BY_TORCH:
            return self._set_flags(group, having)
        if self._form == BY_BLOCK:
            return self._put_blocks(number, group, having)
        return 1

    def _ends(self, *_: object) -> None:
        for group in self._runs.values():
            group.ends()
        self._restore()

    def _restore(self, *_: object) -> None:
        for group in self._runs.values():
            group.leave()
        for settings, flags in self._flags:
            settings.update(flags)
        self._flags.clear()

    def _set_flags(self, group: dict[str, Any], having: Sequence[Tensor]) -> int:
        """As if the optimizer had been made with ``fused=True``."""
        alike = all(p.is_floating_point() and _is_plain(p) and _is_like(p) for p in having)
        if group["differentiable"] or not alike:
            return len(having)
        self._flags.append((group, {key: group[key] for key in ("fused", "foreach")}))
        group.update(fused=True, foreach=False)
        for parameter in having:
            state = self._optimizer.state.get(parameter, {})
            step = state.get("step")
            if isinstance(step, Tensor) and step.device != parameter.device:
                state["step"] = step.to(parameter.device)
        return 1

    def _put_blocks(self, number: int, group: dict[str, Any], having: Sequence[Tensor]) -> int:
        known = self._runs.get(number)
        if known is None or not known.fits(having):
            if known is not None:
                known.part()
            self._runs[number] = _Group(group, having, self._optimizer)
        self._runs[number].begins()
        return len(group["params"])


BY_TORCH, BY_BLOCK, BY_LAYER = "torch's fused form", "in blocks", "all layers together"


def _form(optimizer: Optimizer, elementwise: bool) -> str:
    if type(optimizer) in FUSED:
        return BY_TORCH
    if isinstance(optimizer, Layerwise):
        return BY_LAYER
    if elementwise or is_elementwise(optimizer):
        return BY_BLOCK
    names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
    raise ModelError(
        f"the optimizer {type(optimizer).__name__} cannot be fused: slipstream does not know that "
        f"it treats every value on its own; allowed: {names}, Lars, Lamb; if yours does, say so by "
        "compute: {fuse_optimizer: elementwise}, else leave fuse_optimizer out"
    )


class _Group:
    """A group of an optimizer, and the runs of its parameters."""

    def __init__(
        self, settings: dict[str, Any], having: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        self._settings, self._having, self._optimizer = settings, list(having), optimizer
        self._runs, self._others = _runs(having, optimizer)
        self._layout: list[Any] = []
        self._users: list[Tensor] | None = None  # while the optimizer steps

    def fits(self, having: Sequence[Tensor]) -> bool:
        """Whether nothing has moved since the last step."""
        return _same(_layout(having, self._optimizer), self._layout)

    def begins(self) -> None:
        """Put the blocks in the place of the parameters."""
        for run in self._runs:
            run.begins()
        self._users = self._settings["params"]
        blocks = [block for run in self._runs for block in run.blocks]
        self._settings["params"] = [*self._others, *blocks]

    def ends(self) -> None:
        """Give values and states to the parameters."""
        if self._users is None:
            return
        for run in self._runs:
            run.ends()
        self._layout = _layout(self._having, self._optimizer)

    def leave(self) -> None:
        """Put the parameters back; idempotent."""
        for run in self._runs:
            run.leave()
        if self._users is not None:
            self._settings["params"], self._users = self._users, None

    def part(self) -> None:
        """Give each parameter a state of its own, for what comes after these runs."""
        for parameter in self._having:
            state = self._optimizer.state.get(parameter, {})
            state.update({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)})


class _Run:
    """Parameters of one kind end to end, cut into blocks, while nothing of them moves.

    Args:
        parameters: one, whose memory is used, or several small ones, which are copied.
        optimizer: has their states.
        size: values of a block.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer, size: int) -> None:
        self._parameters, self._optimizer, self._size = parameters, optimizer, size
        self._copied = len(parameters) > 1
        first, total = parameters[0], sum(p.numel() for p in parameters)
        self._values = first.detach().new_empty(total) if self._copied else flat(first)
        self._places = self._views(self._values)
        self._states: dict[str, Tensor] = {}  # all values of one kind of state
        self.blocks = self._cut(self._values)
        self._block_states: list[dict[str, Any]] = [{} for _ in self.blocks]
        self._adopt_states()

    def begins(self) -> None:
        """Fill the blocks, give them gradients and states."""
        gradients = [_gradient(p) for p in self._parameters]
        if self._copied:
            torch._foreach_copy_(self._places, [p.detach() for p in self._parameters])
            whole = torch.empty_like(self._values)
            torch._foreach_copy_(self._views(whole), gradients)
        else:
            whole = flat(gradients[0])
        parts = self._cut(whole)
        for block, gradient, state in zip(self.blocks, parts, self._block_states, strict=True):
            block.grad = gradient
            self._optimizer.state[block] = state

    def ends(self) -> None:
        """Give values and states to the parameters."""
        if self._copied:
            torch._foreach_copy_([p.detach() for p in self._parameters], self._places)
        first = self._block_states[0]
        for key in first:
            if self._is_one_each(key):
                self._keep(key)
            else:
                self._tell(key, first[key])

    def leave(self) -> None:
        """Take the blocks out of the optimizer; idempotent."""
        for block in self.blocks:
            self._optimizer.state.pop(block, None)
            block.grad = None

    def _is_one_each(self, key: str) -> bool:
        """Whether a state has one value for each of the parameters'."""
        value, block = self._block_states[0][key], self.blocks[0]
        return isinstance(value, Tensor) and value.shape == block.shape

    def _keep(self, key: str) -> None:
        """Have the states of all blocks in one tensor, of which the parameters' are views."""
        known = self._states.get(key)
        if known is None:
            like = self._block_states[0][key]
            known = torch.empty_like(self._values, dtype=like.dtype)
            self._share(key, known)
        parts = self._cut(known)
        for part, state in zip(parts, self._block_states, strict=True):
            if state[key].data_ptr() != part.data_ptr():
                part.copy_(state[key])
                state[key] = part

    def _tell(self, key: str, value: Any) -> None:
        """Give every parameter a number of its own: a plain step would count in each of them."""
        states = [self._optimizer.state[p] for p in self._parameters]
        if not isinstance(value, Tensor):
            for state in states:
                state[key] = value
        elif all(key in state for state in states):
            torch._foreach_copy_([state[key] for state in states], [value] * len(states))
        else:
            for state in states:
                state[key] = value.clone()

    def _share(self, key: str, known: Tensor) -> None:
        self._states[key] = known
        for parameter, view in zip(self._parameters, self._views(known), strict=True):
            self._optimizer.state[parameter][key] = view

    def _adopt_states(self) -> None:
        """Go on from the states that the parameters have."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        for key, value in states[0].items():
            if _is_shaped(key, value, self._parameters[0]):
                known = torch.empty_like(self._values, dtype=value.dtype)
                torch._foreach_copy_(self._views(known), [state[key] for state in states])
                parts = self._cut(known)
                for part, state in zip(parts, self._block_states, strict=True):
                    state[key] = part
                self._share(key, known)
                continue
            for state in self._block_states:
                state[key] = value.clone() if isinstance(value, Tensor) else value

    def _cut(self, whole: Tensor) -> list[Tensor]:
        """The part of each block."""
        ones = _ones(self._parameters[0])
        return [part.view(*ones, part.numel()) for part in whole.split(self._size)]

    def _views(self, whole: Tensor) -> list[Tensor]:
        """The part of each parameter, laid out like it."""
        views, start = [], whole.storage_offset()
        for parameter in self._parameters:
            views.append(whole.as_strided(parameter.size(), parameter.stride(), start))
            start += parameter.numel()
        return views


def _runs(parameters: Sequence[Tensor], optimizer: Optimizer) -> tuple[list[_Run], list[Tensor]]:
    """The runs of parameters that have a gradient, and those parameters that stay as they are."""
    runs, others = [], []
    small: dict[Hashable, list[Tensor]] = {}
    for parameter in parameters:
        size = BLOCK.get(parameter.device.type, LARGE)
        if not _is_plain(parameter):
            others.append(parameter)
        elif parameter.numel() < size:
            numbers = _numbers(optimizer.state.get(parameter, {}), parameter)
            kind = (parameter.dtype, parameter.device, _ones(parameter), numbers)
            small.setdefault(kind, []).append(parameter)
        elif parameter.device.type in BLOCK and _is_like(parameter):
            runs.append(_Run([parameter], optimizer, size))
        else:
            others.append(parameter)
    for alike in small.values():
        if len(alike) == 1:
            others += alike
        else:
            runs.append(_Run(alike, optimizer, BLOCK.get(alike[0].device.type, LARGE)))
    return runs, others


def _ones(parameter: Tensor) -> tuple[int, ...]:
    """Axes before that of the values: some optimizers treat vectors unlike matrices."""
    return (1,) * (min(parameter.ndim, 2) - 1)


def _is_plain(parameter: Tensor) -> bool:
    gradient = _gradient(parameter)
    dense = gradient.layout == torch.strided and is_dense(parameter)
    return dense and gradient.dtype == parameter.dtype


def _is_like(parameter: Tensor) -> bool:
    """Whether the gradient has its values in the order of the parameter's."""
    return _gradient(parameter).stride() == parameter.stride()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # others are left out
    return parameter.grad


def _is_shaped(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state has one value for each of the parameter's."""
    shaped = isinstance(value, Tensor) and value.shape == parameter.shape
    return shaped and (parameter.ndim > 0 or key not in COUNTERS)


def _numbers(state: dict[str, Any], parameter: Tensor) -> Hashable:
    """The names of a parameter's states, and the values of those that are one number."""
    return tuple(
        (key, None)
        if _is_shaped(key, value, parameter)
        else (key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else id(value))
        for key, value in sorted(state.items())
    )


def _layout(parameters: Sequence[Tensor], optimizer: Optimizer) -> list[Any]:
    """What must not change for runs to stay right."""
    found: list[Any] = []
    for parameter in parameters:
        found += (parameter, parameter.data_ptr(), parameter.shape)
        found.append(_is_plain(parameter) and _is_like(parameter))
        state = optimizer.state.get(parameter, {})
        found += (value for value in state.values() if isinstance(value, Tensor))
    return found


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(
        a is b if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True)
    )
