"""The user's optimizer in few calls: torch's fused form, or its small parameters put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.codecs.compressor import is_dense
from slipstream.errors import ModelError
from slipstream.fusion.small_parameters import (
    SmallParameters,
    gradient_of,
    lies_like_its_gradient,
)
from slipstream.optim.elementwise import ELEMENTWISE, is_elementwise
from slipstream.optim.layerwise import Layerwise
from slipstream.strategy import Row

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Classes that torch updates in one call."""


def fuse_optimizer(optimizer: Optimizer, *, elementwise: bool = False) -> FusedOptimizer:
    """Make a step of ``optimizer`` few calls, until ``close()`` of the result.

    - SGD, Adam, AdamW, Adagrad: torch's fused form, one call for each group.
    - other optimizers of torch that treat every value on its own, and those that
      ``elementwise`` vouches for: small parameters are stepped together (``small_parameters``).
    - Lars and Lamb already step parameters together; Lamb's moments become torch's fused Adam.

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
        self._optimizer, self._form = optimizer, check_fusible(optimizer, elementwise=elementwise)
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._groups: dict[int, SmallParameters] = {}  # by the number of the group
        self._dense: dict[Tensor, tuple[int, ...]] = {}  # parameters without holes, their strides
        self._updates = self._calls = 0
        self._hooks = [optimizer.register_step_post_hook(self._ends)]
        if isinstance(optimizer, Layerwise):
            optimizer.fused = True

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
        for group in self._groups.values():
            group.part()
        self._groups.clear()
        self._dense.clear()
        if isinstance(self._optimizer, Layerwise):
            self._optimizer.fused = False

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
        for group in self._groups.values():
            group.ends()
        self._restore()

    def _restore(self, *_: object) -> None:
        for group in self._groups.values():
            group.leave()
        for settings, flags in self._flags:
            settings.update(flags)
        self._flags.clear()

    def _set_flags(self, group: dict[str, Any], having: Sequence[Tensor]) -> int:
        """As if the optimizer had been made with ``fused=True``."""
        if group["differentiable"] or not all(map(self._lie_side_by_side, having)):
            return len(having)
        self._flags.append((group, {key: group[key] for key in ("fused", "foreach")}))
        group.update(fused=True, foreach=False)
        if having[0].device.type != "cpu":
            self._move_steps(having)
        return 1

    def _lie_side_by_side(self, parameter: Tensor) -> bool:
        """Whether torch's kernels can go through parameter and gradient by their memory; a gradient
        in another order is put in the parameter's."""
        gradient = gradient_of(parameter)
        if gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
            return False
        if self._dense.get(parameter) != parameter.stride():
            if not is_dense(parameter):
                return False
            self._dense[parameter] = parameter.stride()
        if not lies_like_its_gradient(parameter):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        return True

    def _move_steps(self, having: Sequence[Tensor]) -> None:
        """Fused kernels count on the device, torch's other forms on the host."""
        for parameter in having:
            state = self._optimizer.state.get(parameter, {})
            step = state.get("step")
            if isinstance(step, Tensor) and step.device != parameter.device:
                state["step"] = step.to(parameter.device)

    def _put_blocks(self, number: int, group: dict[str, Any], having: Sequence[Tensor]) -> int:
        known = self._groups.get(number)
        if known is None or not known.fits(having):
            if known is not None:
                known.part()
            self._groups[number] = SmallParameters(group, having, self._optimizer)
        return self._groups[number].begins()


BY_TORCH = "torch's fused form"
BY_BLOCK = "small parameters together"
BY_LAYER = "layers together"


def check_fusible(optimizer: Optimizer, *, elementwise: bool = False) -> str:
    """How an optimizer can be fused.

    Raises:
        ModelError: it cannot.
    """
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
