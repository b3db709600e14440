"""The base of Lars and Lamb: which parameters are adapted, which decay, and their grouping.

[Note: No tensor operation per parameter] A network has hundreds of parameters, most of them small:
one operation per parameter costs more in calls than in arithmetic. So parameters with the same
treatment go through torch's foreach operations as one list; their norms become one tensor, whose
ratios are computed at once and never leave the device. The Python loop over parameters only sorts
them into lists. On a CPU, where a call costs little and memory much, the lists are short enough for
the caches: what one operation leaves is there for the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from slipstream.errors import UsageError
from slipstream.optim.settings import check_flag, check_learning_rate, check_number, patterns
from slipstream.optim.trust_ratio import norms

PART = 2**18
"""Values that a CPU steps at once: 1 MB, a part of a core's cache."""

ParamGroup = dict[str, Any]
"""Parameters and their settings, as in ``torch.optim.Optimizer.param_groups``."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """Whether the trust ratio scales a parameter's step, and how fast the parameter decays."""

    adapted: bool
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Bunch:
    """Parameters of one group, device, dtype and treatment; each has a gradient."""

    group: ParamGroup
    treatment: Treatment
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class Layerwise(Optimizer, ABC):
    """An optimizer whose steps are scaled by a trust ratio, layer by layer.

    Settings of every group, beside those of the subclass: ``lr``, ``weight_decay``,
    ``adapt_vectors``, ``decay_vectors``, ``adapt_undecayed``, ``exclude``.
    """

    sum_squares: Callable[[Sequence[Tensor], Tensor], Tensor] | None = None
    """Where parameters and gradients are a rank's shares: from parameters and the squared norms of
    this rank's shares to those of the whole layers."""

    fused = False
    """Whether torch's fused kernels compute what they can; ``slipstream.fusion`` says so."""

    def __init__(self, params: ParamsT, arguments: ParamGroup) -> None:
        """``arguments``: the settings; the others of the subclass's ``locals()`` do not count."""
        others = ("self", "params", "__class__")
        super().__init__(params, {k: v for k, v in arguments.items() if k not in others})
        idle = [pattern for group in self.param_groups for pattern in group["exclude"]]
        _refuse_idle(idle, self.param_groups)

    @abstractmethod
    def _check(self, group: ParamGroup) -> None:
        """Refuse settings of the subclass that are out of range."""

    @abstractmethod
    def _update(self, bunches: Sequence[Bunch]) -> None:
        """Move the parameters of all bunches by one step."""

    def _norms(self, bunch: Bunch, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of a tensor for each parameter, of which this rank may have a share."""
        each = norms(tensors)
        if self.sum_squares is None:
            return each
        return self.sum_squares(bunch.parameters, each.square()).sqrt()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters, as torch's optimizers do; missing settings take the defaults.

        Raises:
            UsageError: a setting is out of range, a pattern of the group matches nothing in it, or
                a parameter is complex.
        """
        has_patterns = "exclude" in param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_shared(group)
            self._check(group)
            if has_patterns:
                _refuse_idle(group["exclude"], [group])
        except UsageError:
            self.param_groups.pop()
            raise

    def _check_shared(self, group: ParamGroup) -> None:
        check_learning_rate(group["lr"])
        check_number("weight_decay", group["weight_decay"], "1e-4 for Lars, 0.01 for Lamb")
        for name in ("adapt_vectors", "decay_vectors", "adapt_undecayed"):
            check_flag(name, group[name])
        group["exclude"] = patterns(group["exclude"])
        if group["exclude"] and "param_names" not in group:
            raise UsageError(
                f"exclude is {group['exclude']}, but the parameters have no names; allowed: "
                "patterns for named parameters; pass model.named_parameters()"
            )
        for index, parameter in enumerate(group["params"]):
            if parameter.is_complex():
                raise UsageError(
                    f"{name_of(group, index)} is {parameter.dtype}; allowed: real parameters; "
                    "store real and imaginary parts in a real parameter (torch.view_as_real)"
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; gradients do not change.

        Args:
            closure: recomputes the loss and the gradients; called once, first.

        Returns:
            What the closure returned.

        Raises:
            UsageError: a gradient is sparse; no parameter has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Group all parameters before the first update: an error leaves the model unchanged.
        bunches = [bunch for group in self.param_groups for bunch in bunches_of(group)]
        if self.sum_squares is None:  # which is a collective for each bunch
            bunches = [part for bunch in bunches for part in _in_parts(bunch)]
        self._update(bunches)
        return loss


def bunches_of(group: ParamGroup) -> Iterator[Bunch]:
    """The parameters of a group that have a gradient, by device, dtype and treatment.

    Raises:
        UsageError: a gradient is sparse.
    """
    excluded = _excluded(tuple(group["exclude"]), tuple(group.get("param_names", ())))
    bunches: dict[tuple[torch.device, torch.dtype, Treatment], Bunch] = {}
    for index, parameter in enumerate(group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise UsageError(
                f"the gradient of {name_of(group, index)} is sparse; allowed: dense gradients; "
                "build its module with sparse=False, or give it to torch.optim.SparseAdam"
            )
        treatment = treatment_of(group, parameter, excluded=index in excluded)
        key = (parameter.device, parameter.dtype, treatment)
        bunch = bunches.setdefault(key, Bunch(group, treatment))
        bunch.parameters.append(parameter)
        bunch.gradients.append(gradient)
    yield from bunches.values()


def _in_parts(bunch: Bunch) -> Iterator[Bunch]:
    """Cut a bunch into short lists of parameters on a CPU; elsewhere it stays whole."""
    if bunch.parameters[0].device.type != "cpu":
        yield bunch
        return
    part = Bunch(bunch.group, bunch.treatment)
    room = PART
    for parameter, gradient in zip(bunch.parameters, bunch.gradients, strict=True):
        if parameter.numel() > room and part.parameters:
            yield part
            part, room = Bunch(bunch.group, bunch.treatment), PART
        part.parameters.append(parameter)
        part.gradients.append(gradient)
        room -= parameter.numel()
    yield part


def treatment_of(group: ParamGroup, parameter: Tensor, *, excluded: bool) -> Treatment:
    """Treatment of a parameter; ``excluded``: a pattern of ``exclude`` matches it.

    Example:
        >>> group = {"weight_decay": 0.1, "adapt_vectors": False, "decay_vectors": False,
        ...          "adapt_undecayed": True}
        >>> treatment_of(group, torch.zeros(3, 3), excluded=False)
        Treatment(adapted=True, weight_decay=0.1)
        >>> treatment_of(group, torch.zeros(3), excluded=False)
        Treatment(adapted=False, weight_decay=0.0)
    """
    if excluded:
        return Treatment(False, 0.0)
    vector = parameter.ndim < 2
    decay = float(group["weight_decay"]) if group["decay_vectors"] or not vector else 0.0
    adapted = group["adapt_vectors"] or not vector
    return Treatment(adapted and (group["adapt_undecayed"] or decay != 0), decay)


def name_of(group: ParamGroup, index: int) -> str:
    """A parameter in an error text: its name, else its index and shape."""
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
    return f"parameter {index} of its group, of shape {tuple(group['params'][index].shape)},"


@lru_cache(maxsize=256)
def _excluded(patterns: tuple[str, ...], names: tuple[str, ...]) -> frozenset[int]:
    """Indices of the names that match a pattern; cached, since every step needs them."""
    return frozenset(
        index
        for index, name in enumerate(names)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def _refuse_idle(patterns: Sequence[str], groups: Sequence[ParamGroup]) -> None:
    names = [name for group in groups for name in group.get("param_names", ())]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"exclude has {pattern!r}, which matches no parameter; allowed: patterns such as "
                f"'*.bias' for names such as {names[0]!r}; fix the pattern or remove it"
            )
