"""The parameters that a session trains: those that model and optimizer had when it began.

Segments, shards, masters and codecs are laid out for these. A parameter that enters later would be
trained by each rank alone, one that is replaced would never be updated: both are refused.

[Note: Looking costs nothing]
To walk a model in every iteration would take 0.2 ms. So torch tells of every parameter and module
that is registered anywhere, and only then the model is walked. What torch does not tell of
(``model.half()``, parameters overwritten by ``model.to()``) changes all parameters alike: the first
and the last one are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from slipstream.errors import UsageError

_SHOWN = 3
_REMEDY = "close() the session before such a change and accelerate() again after it"
_OR_WRITE = ", or write into the parameter that is there: with torch.no_grad(): p.copy_(values)"


class Members:
    """Compares a model and an optimizer with what they were at `accelerate()`.

    Args:
        model: as it is trained from now on.
        optimizer: of the model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names = {p: name for name, p in model.named_parameters()}
        ends = [*self._names][:1] + [*self._names][-1:]
        self._ends = [(p, _form(p), _owner(model, self._names[p])) for p in ends]
        self._held = [tuple(group["params"]) for group in optimizer.param_groups]
        self._registered = False
        self._hooks = [
            register_module_parameter_registration_hook(self._notice),
            register_module_module_registration_hook(self._notice),
        ]

    def check_model(self) -> None:
        """Refuse a model that has other parameters by now, or parameters of another form.

        Raises:
            UsageError: names the parameters.
        """
        replaced = [p for p, _, (module, key) in self._ends if getattr(module, key, None) is not p]
        if self._registered or replaced:
            self._compare_names()
            self._registered = False
        for parameter, then, _ in self._ends:
            if (now := _form(parameter)) != then:
                raise UsageError(
                    f"parameter {self._names[parameter]} was {_described(then)} at accelerate() "
                    f"and is {_described(now)} now; {_REMEDY}"
                )

    def check_optimizer(self) -> None:
        """Refuse an optimizer that holds parameters that the model did not have.

        Raises:
            UsageError: names the group.
        """
        lists = [group["params"] for group in self._optimizer.param_groups]
        if len(lists) == len(self._held) and all(
            len(now) == len(then) and all(map(is_, now, then))
            for now, then in zip(lists, self._held, strict=True)
        ):
            return
        for number, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    raise UsageError(
                        f"the optimizer's group {number} holds a parameter of shape "
                        f"{tuple(parameter.shape)} (number {position}) that was not in the model "
                        f"at accelerate(): this session would not train it; {_REMEDY}"
                    )
        self._held = [tuple(held) for held in lists]

    def close(self) -> None:
        """Let torch tell no more."""
        while self._hooks:
            self._hooks.pop().remove()

    def _notice(self, module: nn.Module, name: str, member: object) -> None:
        self._registered = True

    def _compare_names(self) -> None:
        now = {p: name for name, p in self._model.named_parameters()}
        entered = [name for p, name in now.items() if p not in self._names]
        left = [name for p, name in self._names.items() if p not in now]
        replaced = sorted({*entered} & {*left})
        changes = {
            "new": [name for name in entered if name not in replaced],
            "gone": [name for name in left if name not in replaced],
            "replaced": replaced,
        }
        text = "; ".join(f"{what}: {_listed(names)}" for what, names in changes.items() if names)
        if text:
            only_replaced = not (changes["new"] or changes["gone"])
            raise UsageError(
                f"the model has other parameters than at accelerate() ({text}), which this session "
                f"would not train; {_REMEDY}{_OR_WRITE if only_replaced else ''}"
            )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _form(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.shape, parameter.stride(), parameter.device


def _described(form: tuple[Any, ...]) -> str:
    dtype, shape, stride, device = form
    return f"{dtype} {tuple(shape)} with strides {stride} on {device}"


def _listed(names: Iterable[str]) -> str:
    first, *rest = [*names]
    shown = [first, *rest[: _SHOWN - 1]]
    more = len(rest) + 1 - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
