"""The user's optimizer in few calls: torch's fused form, or its small parameters put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.codecs.compressor import is_dense
from slipstream.errors import ModelError
from slipstream.fusion.memory_in_common import PLAIN, MemoryInCommon
from slipstream.fusion.small_parameters import SmallParameters, gradient_of
from slipstream.fusion.stand_in import PreparedStep, StandIn
from slipstream.optim.elementwise import COUNTERS, ELEMENTWISE, distinct_name, is_elementwise
from slipstream.optim.layerwise import Layerwise, ParamGroup
from slipstream.optim.memory_order import laid_like, lies_like
from slipstream.strategy import Row

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Classes that torch updates in one call."""


def fuse_optimizer(optimizer: Optimizer, *, elementwise: bool = False) -> FusedOptimizer:
    """Make a step of ``optimizer`` few calls, until ``close()`` of the result.

    - SGD, Adam, AdamW, Adagrad: torch's fused form, one call for each group.
    - other optimizers of torch that treat every value on its own, and those that
      ``elementwise`` vouches for: small parameters are stepped together (``small_parameters``).
    - Lars and Lamb already step parameters together; Lamb's moments become torch's fused Adam.

    The optimizer stays the user's: groups, schedulers, hooks, ``state_dict()`` and
    ``load_state_dict()`` are as before. Stepped as they are: a step with a closure, groups with
    ``differentiable``, and parameters that are complex, have holes in their memory, share it with
    others, or have a gradient or state that is sparse or of another type; on a CPU also those of
    16 bits, of which torch's fused SGD skips most values; on CUDA Adagrad, for which torch has no
    fused form there.

    Args:
        optimizer: torch's, or of a class of the user's own.
        elementwise: its class treats every value of a parameter on its own.

    Exactness: reordered: each value is computed by the same operations, but vectorized, and torch's
    fused kernels contract some of them.

    Raises:
        ModelError: an optimizer that neither torch nor blocks can fuse, or without hooks.

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

    Nothing that is the user's is kept from one step to the next unless it is compared first with
    what is in use: groups, parameters, gradients and states may be replaced at any time.
    """

    def __init__(self, optimizer: Optimizer, *, elementwise: bool = False) -> None:
        self._optimizer, self._form = optimizer, check_fusible(optimizer, elementwise=elementwise)
        self._stand_in: StandIn | None = None
        self._small: dict[int, SmallParameters] = {}  # of the last step, by the number of the group
        self._memory = MemoryInCommon()
        self._stepping = False
        self._gradients: list[tuple[Tensor, Tensor]] = []  # which another order took the place of
        self._updates = self._calls = 0
        if isinstance(optimizer, Layerwise):
            optimizer.fused = True

    def attach(self) -> None:
        """Fuse steps from now on."""
        self._stand_in = StandIn(self._optimizer, self._prepare, self._ends)

    def close(self) -> None:
        """Leave the optimizer as it was; idempotent."""
        if self._stand_in is not None:
            self._stand_in.close()
        self._forget()
        for group in self._optimizer.param_groups if self._form == BY_TORCH else ():
            if not (group.get("capturable") or group.get("fused")):
                _count_on_host(self._optimizer.state.get(p) for p in group["params"])
        if isinstance(self._optimizer, Layerwise):
            self._optimizer.fused = False

    def report_rows(self) -> list[Row]:
        """Report how many updates became how many calls."""
        name = type(self._optimizer).__name__
        count = self._updates or sum(len(g["params"]) for g in self._optimizer.param_groups)
        calls = str(self._calls) if self._calls else "few, counted in the first step"
        return [Row("optimizer", f"{count} {name} updates -> {calls}", self._form)]

    @torch.no_grad()
    def _prepare(self) -> PreparedStep:
        """Prepare what this step goes through, in place of the user's groups."""
        if self._stepping:  # the last step raised: states may be ahead of their parameters' numbers
            self._forget()
        self._stepping, self._updates, self._calls = True, 0, 0
        groups = self._optimizer.param_groups
        with_gradients = [[p for p in group["params"] if p.grad is not None] for group in groups]
        stage = PreparedStep([], self._optimizer.state)
        shared: Set[int] = set()
        if self._form == BY_BLOCK:  # what it adds for blocks is not the user's
            stage = PreparedStep([], defaultdict(dict, self._optimizer.state))
            shared = self._memory.of([p for having in with_gradients for p in having])
        known, self._small = self._small, {}
        for number, (group, having) in enumerate(zip(groups, with_gradients, strict=True)):
            self._updates += len(having)
            if not having or self._is_left_to_torch(group, having):
                stage.groups.append(group)
                self._calls += min(1, len(having)) if self._form == BY_LAYER else len(having)
            elif self._form == BY_TORCH:
                stage.groups.extend(self._by_torch(group, having))
            else:
                small = self._fitting(known.pop(number, None), having, shared)
                self._small[number] = small
                params = small.begins(stage.states)
                self._calls += len(params)
                stage.groups.append({**group, "params": params})
        for small in known.values():
            small.part()
        return stage

    def _is_left_to_torch(self, group: ParamGroup, having: Sequence[Tensor]) -> bool:
        """Whether a group is stepped as it is."""
        if self._form == BY_LAYER:
            return True
        captured = self._form == BY_BLOCK and group.get("capturable")  # checks are not replayed
        twice = len({*map(id, having)}) < len(having)  # stepped one after the other
        no_kernel = isinstance(self._optimizer, torch.optim.Adagrad) and having[0].is_cuda
        return bool(captured or twice or no_kernel or group.get("differentiable"))

    def _by_torch(self, group: ParamGroup, having: Sequence[Tensor]) -> list[ParamGroup]:
        """Make groups as of an optimizer with ``fused=True``, where torch's kernels can go."""
        find, nothing = self._optimizer.state.get, dict[str, Any]()
        states = [find(p, nothing) for p in having]
        fused, others = [having], list[Tensor]()
        if not _all_lie_side_by_side(having, states):
            fused, others = self._sorted(having, states, has_momentum=bool(group.get("momentum")))
        self._calls += len(fused) + len(others)
        groups = [{**group, "params": part, "fused": True, "foreach": False} for part in fused]
        if others:  # GradScaler leaves scales to a fused form alone
            scaled = getattr(self._optimizer, "grad_scale", None) is not None
            groups.append({**group, "params": others, "fused": group["fused"] and scaled})
        return groups

    def _sorted(
        self,
        having: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        *,
        has_momentum: bool,
    ) -> tuple[list[Sequence[Tensor]], list[Tensor]]:
        """Parameters for calls of torch's kernels, and others."""
        begun: list[Tensor] = []
        fresh: list[Tensor] = []  # torch's fused momentum begins in all of a call or in none
        others: list[Tensor] = []
        for parameter, state in zip(having, states, strict=True):
            if not self._lie_side_by_side(parameter, state):
                others.append(parameter)
            elif has_momentum and state.get("momentum_buffer") is None:
                fresh.append(parameter)
            else:
                begun.append(parameter)
        return [part for part in (begun, fresh) if part], others

    def _lie_side_by_side(self, parameter: Tensor, state: dict[str, Any]) -> bool:
        """Whether torch's kernels can go through a parameter, its gradient and its state by their
        memory; what has another order is put in the parameter's."""
        gradient = gradient_of(parameter)
        dtype, stride = parameter.dtype, parameter.stride()
        if (
            gradient.layout is not torch.strided
            or gradient.dtype is not dtype
            or not _has_kernel(dtype, parameter.device.type)
            or not is_dense(parameter)
        ):
            return False
        for key, value in state.items():
            if key in COUNTERS:
                if not isinstance(value, Tensor) or value.dtype not in COUNTED_IN:
                    return False
            elif isinstance(value, Tensor) and key in OPERANDS:
                if value.dtype is not dtype or value.shape != parameter.shape:
                    return False
                if value.stride() != stride:
                    state[key] = laid_like(value, parameter)
        if gradient.stride() != stride and not lies_like(gradient, parameter):
            parameter.grad = laid_like(gradient, parameter)
            self._gradients.append((parameter, gradient))
        if parameter.device.type != "cpu":
            _move_step(parameter, state)
        return True

    def _fitting(
        self, known: SmallParameters | None, having: Sequence[Tensor], shared: Set[int]
    ) -> SmallParameters:
        if known is not None:
            if known.fits(having, shared):
                return known
            known.part()
        return SmallParameters(having, self._optimizer, shared)

    @torch.no_grad()
    def _ends(self, stage: PreparedStep) -> None:
        self._stepping = False
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
        if self._form != BY_BLOCK:
            return
        for small in self._small.values():
            small.ends(stage.states)
        self._optimizer.state.update(stage.states)
        for group, stepped in zip(self._optimizer.param_groups, stage.groups, strict=True):
            group.update({**stepped, "params": group["params"]})  # a class may count there

    def _forget(self) -> None:
        """Start from what is the user's."""
        for small in self._small.values():
            small.part()
        self._small.clear()
        self._gradients.clear()
        self._stepping = False


OPERANDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
"""States that torch's kernels go through by their memory."""

COUNTED_IN = (torch.float32, torch.float64)
"""Types of a number of steps that torch's kernels read."""


def _all_lie_side_by_side(
    parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether torch's kernels can go through all of them as they are, and all have the same states;
    in few calls, as it is so in almost every step."""
    devices = {p.device.type for p in parameters}
    gradients: list[Any] = [p.grad for p in parameters]
    kept: list[list[Any]] = [[s.get(key) for s in states] for key in OPERANDS if key in states[0]]
    counts: list[Any] = [s.get(key) for key in COUNTERS if key in states[0] for s in states]
    if (
        {g.layout for g in gradients} != {torch.strided}
        or len({*map(len, states)}) > 1
        or not {type(x) for part in (counts, *kept) for x in part} <= {*PLAIN}
        or not {n.dtype for n in counts} <= {*COUNTED_IN}
        or len(devices) > 1
        or ("cpu" not in devices and not {n.device.type for n in counts} <= devices)
        or not all(p.is_contiguous() or _is_dense(p.shape, p.stride()) for p in parameters)
    ):
        return False
    dtypes = [p.dtype for p in parameters]
    sizes, strides = [*map(Tensor.numel, parameters)], [*map(Tensor.stride, parameters)]
    return all(_has_kernel(dtype, *devices) for dtype in {*dtypes}) and all(
        [x.dtype for x in part] == dtypes
        and [*map(Tensor.numel, part)] == sizes
        and [*map(Tensor.stride, part)] == strides
        for part in (gradients, *kept)
    )


def _has_kernel(dtype: torch.dtype, device: str) -> bool:
    """Whether torch has a kernel that is right: on a CPU, SGD's of torch 2.13 leaves most 16-bit
    values as they were (pytorch #191763)."""
    return dtype.is_floating_point and (device != "cpu" or dtype.itemsize >= 4)


@lru_cache(maxsize=4096)
def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    return is_dense(torch.empty_strided(shape, stride, device="meta"))


def _move_step(parameter: Tensor, state: dict[str, Any]) -> None:
    """Fused kernels count on the device, torch's other forms on the host."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.device != parameter.device:
        state["step"] = step.to(parameter.device, torch.float32)


def _count_on_host(states: Iterable[Any]) -> None:
    """Keep the count of steps on the host, as torch does: on the device, each would wait for it."""
    for state in states:
        if state and isinstance(step := state.get("step"), Tensor):
            state["step"] = step.cpu()


BY_TORCH = "torch's fused form"
BY_BLOCK = "small parameters together"
BY_LAYER = "layers together"


def check_fusible(optimizer: Optimizer, *, elementwise: bool = False) -> str:
    """Find out how an optimizer can be fused.

    Raises:
        ModelError: it cannot.
    """
    if type(optimizer) in FUSED:
        return BY_TORCH
    if isinstance(optimizer, Layerwise):
        return BY_LAYER
    inner = [type(one).__name__ for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if inner:
        raise ModelError(
            f"the optimizer {type(optimizer).__name__} cannot be fused: it is around another one "
            f"({inner[0]}), which steps parameters by themselves; leave fuse_optimizer out"
        )
    if elementwise or is_elementwise(optimizer):
        return BY_BLOCK
    names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
    raise ModelError(
        f"the optimizer {distinct_name(optimizer)} cannot be fused: slipstream does not know that "
        f"it treats every value on its own; allowed: {names}, Lars, Lamb; if yours does, say so by "
        "compute: {fuse_optimizer: elementwise}, else leave fuse_optimizer out"
    )
