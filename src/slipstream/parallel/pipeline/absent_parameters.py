"""Parameters of other ranks' stages: shape, type and gradient are there, values are not.

The class of such a parameter is a subclass of ``nn.Parameter`` with a ``__torch_function__``, which
torch calls wherever the parameter is an argument. So an optimizer, hooks and ``named_parameters()``
work as before, and whoever asks for values gets an error instead of the NaN of a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.gradients.shards import METADATA
from slipstream.parallel.pipeline.placeholders import placeholder
from slipstream.pytree import among


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a parameter is not there.

    Attributes:
        name: in the model.
        owner: the rank that has it.
        own_class: of the parameter, before.
        ignored: whether values are of no use now, as what a stage computes of them is dropped.
    """

    name: str
    owner: int
    own_class: type[nn.Parameter]
    ignored: Callable[[], bool]

    def refuse(self) -> NoReturn:
        """Say who has it.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"the values of parameter {self.name} were read or written, but rank {self.owner} has "
            "them: in a pipeline (parallel.pipeline) a rank has the parameters of its own stages "
            "alone; read session.checkpoint('model') and write by session.restore, on all ranks"
        )


class AbsentParameter(nn.Parameter):
    """The class of a parameter from `leave_out` to `bring_back`.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> leave_out(weight, "head.weight", owner=1, ignored=lambda: False)
        >>> weight.shape, weight.grad
        (torch.Size([2]), None)
        >>> weight.sum()
        Traceback (most recent call last):
        slipstream.errors.UsageError: the values of parameter head.weight were read or written, ...
    """

    absence: Absence

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for absent in among([args, *kwargs.values()], AbsentParameter):
                if not absent.absence.ignored():
                    absent.absence.refuse()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.absence.refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.absence.refuse()


def leave_out(
    parameter: nn.Parameter, name: str, *, owner: int, ignored: Callable[[], bool]
) -> None:
    """Free the memory of ``parameter``, and refuse from here on to read or write it."""
    parameter.data, parameter.grad = placeholder(parameter.data), None
    vars(parameter)["absence"] = Absence(name, owner, type(parameter), ignored)
    parameter.__class__ = AbsentParameter


def bring_back(parameter: nn.Parameter, strides: tuple[int, ...]) -> None:
    """Give ``parameter`` memory and its own class again; the values are for others to write."""
    absence: Absence = vars(parameter).pop("absence")
    parameter.__class__ = absence.own_class
    parameter.data = parameter.data.new_empty_strided(parameter.shape, strides)
