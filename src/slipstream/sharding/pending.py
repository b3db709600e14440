"""Parameters whose new values are still on their way: whoever reads one waits for it, once.

[Note: Reading is noticed]
While a parameter is pending, its class is a subclass of ``nn.Parameter`` with a
``__torch_function__``, which torch calls wherever the parameter is an argument: in a layer, in
``state_dict()``, in a print. The first call that asks for values waits for them, and gives the
parameter its own class back; from then on it costs nothing. So no layer has to be wrapped, a module
may read the weights of another one (``nn.MultiheadAttention`` does), and no read comes too early.
``torch.func`` takes its arguments apart as pytrees instead: the class is a node of these.

Not noticed: a tensor that was made from the parameter before the step and shares its memory
(``parameter.data``), and code that does not pass through Python (TorchScript, an extension that
takes tensors by pybind11).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from slipstream.errors import UsageError
from slipstream.gradients.shards import METADATA
from slipstream.pytree import among

_DATA: Any = cast(Any, torch.Tensor).data
_OF_ITS_CLASS: dict[Any, Callable[..., Any]] = {
    _DATA.__get__: lambda parameter, *_: parameter.data,
    _DATA.__set__: lambda parameter, values: setattr(parameter, "data", values),
    torch.Tensor.detach: lambda parameter: parameter.detach(),
    torch.Tensor.clone: lambda parameter, **options: parameter.clone(**options),
}
"""What a parameter's own class may answer in another way, as that of half weights does."""


class PendingParameter(nn.Parameter):
    """The class of a parameter from `suspend` to `resume`.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> def arrive():
        ...     resume(weight)
        ...     with torch.no_grad():
        ...         weight.fill_(1)
        >>> suspend(weight, arrive)
        >>> weight.shape, weight.sum().item()
        (torch.Size([2]), 2.0)
    """

    arrive: Callable[[], None]
    """Returns when the values are there and the parameter has its own class again; or raises."""

    own_class: type[nn.Parameter]

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
            for parameter in among([args, *kwargs.values()], PendingParameter):
                parameter.arrive()
                _refuse_trace()
            if func in _OF_ITS_CLASS:  # its own class may have another answer
                return _OF_ITS_CLASS[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.arrive()  # before torch makes a copy of this class
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.arrive()
        return self.__reduce_ex__(protocol)


def suspend(parameter: nn.Parameter, arrive: Callable[[], None]) -> None:
    """Make whoever reads ``parameter`` call ``arrive`` first."""
    parameter.__dict__.update(arrive=arrive, own_class=type(parameter))
    parameter.__class__ = PendingParameter


def resume(parameter: nn.Parameter) -> None:
    """Give ``parameter`` its own class back."""
    parameter.__class__ = parameter.__dict__.pop("own_class", type(parameter))
    parameter.__dict__.pop("arrive", None)


def _refuse_trace() -> None:
    """Its second trace, of a parameter that is there, would differ from the first one."""
    jit: Any = torch.jit
    if jit.is_tracing():
        raise UsageError(
            "torch.jit.trace of a part of the model right after step(): with gradients.transport "
            "sharded its parameters were still on their way, and have arrived now; trace it again, "
            "or trace the whole model"
        )


def _flatten(parameter: PendingParameter) -> tuple[list[Any], None]:
    parameter.arrive()
    return [parameter], None


register_pytree_node(PendingParameter, _flatten, lambda children, _: next(iter(children)))
