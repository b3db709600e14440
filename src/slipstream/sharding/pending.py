"""Parameters whose new values are still on their way: whoever reads one waits for it, once.

[Note: Reading is noticed]
While a parameter is pending, its class is a subclass of ``nn.Parameter`` with a
``__torch_function__``, which torch calls wherever the parameter is an argument: in a layer, in
``state_dict()``, in a print. The first call that asks for values waits for them, and gives the
parameter its own class back; from then on it costs nothing. So no layer has to be wrapped, a module
may read the weights of another one (``nn.MultiheadAttention`` does), and no read comes too early.

Not noticed: a tensor that was made from the parameter before the step and shares its memory
(``parameter.data``), and code that does not pass through Python (TorchScript).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from slipstream.gradients.shares import METADATA

_DATA: Any = cast(Any, torch.Tensor).data
_OF_ITS_CLASS: dict[Any, Callable[..., Any]] = {
    _DATA.__get__: lambda parameter, *_: parameter.data,
    _DATA.__set__: lambda parameter, values: setattr(parameter, "data", values),
    torch.Tensor.detach: lambda parameter: parameter.detach(),
}


def pending_class(arrive: Callable[[nn.Parameter], None]) -> type[nn.Parameter]:
    """A class for parameters that are pending.

    Args:
        arrive: returns when the values of a parameter are there, and its class is its own again.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> def arrive(parameter):
        ...     parameter.__class__ = nn.Parameter
        ...     with torch.no_grad():
        ...         parameter.fill_(1)
        >>> weight.__class__ = pending_class(arrive)
        >>> weight.shape, weight.sum().item()
        (torch.Size([2]), 2.0)
    """

    class PendingParameter(nn.Parameter):
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
                for parameter in _those_of(cls, [args, *kwargs.values()]):
                    arrive(parameter)
                if func in _OF_ITS_CLASS:  # its own class may have another answer
                    return _OF_ITS_CLASS[func](*args)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            arrive(self)  # before torch makes a copy of this class
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            arrive(self)
            return self.__reduce_ex__(protocol)

    return PendingParameter


def _those_of(cls: type, values: Iterable[Any]) -> Iterator[Any]:
    """The parameters of a class among arguments, which may be in lists."""
    for value in values:
        if type(value) is cls:
            yield value
        elif isinstance(value, list | tuple):
            yield from _those_of(cls, value)
