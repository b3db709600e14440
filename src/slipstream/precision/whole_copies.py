"""fp32 copies of 16-bit parameters of which this rank has a part of the master alone.

Averages and the like read parameters from outside, in fp32. Where ranks share the masters, what
they read is a copy: this rank's part of the master, and the 16-bit values of the others. What they
write into it counts until the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn

from slipstream.errors import UsageError


@dataclass(slots=True)
class _Copy:
    values: torch.Tensor
    version: int
    of: Hashable
    """The state of the parameter that it was made from."""


class WholeCopies:
    """Copies by parameter, until the next update.

    Args:
        make: a new tensor with the values of a parameter.
        write: takes what somebody has written into a copy.
        stamp: another one after each change of a parameter.
    """

    def __init__(
        self,
        make: Callable[[nn.Parameter], torch.Tensor],
        write: Callable[[nn.Parameter, torch.Tensor], None],
        stamp: Callable[[nn.Parameter], Hashable],
    ) -> None:
        self._make, self._write, self._stamp = make, write, stamp
        self._copies: dict[nn.Parameter, _Copy] = {}
        self._former: list[tuple[ref[torch.Tensor], int]] = []

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The same tensor for all readers between two updates."""
        self.take(parameter)
        copy, stamp = self._copies.get(parameter), self._stamp(parameter)
        if copy is None:
            values = self._make(parameter)
            copy = self._copies[parameter] = _Copy(values, values._version, stamp)
        elif copy.of != stamp:
            copy.values.copy_(self._make(parameter))
            copy.version, copy.of = copy.values._version, stamp
        return copy.values

    def replace(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """``parameter.data = values``: the copy of before stays as it is, as it may be kept to be
        put back."""
        copy = self._copies.get(parameter)
        if copy is not None and copy.values is not values:
            del self._copies[parameter]

    def take(self, *parameters: nn.Parameter) -> None:
        """Write back what was written into copies; of none: of all."""
        for parameter in parameters or tuple(self._copies):
            copy = self._copies.get(parameter)
            if copy is not None and copy.values._version != copy.version:
                copy.version = copy.values._version
                self._write(parameter, copy.values)
                copy.of = self._stamp(parameter)

    def end(self) -> None:
        """An update begins, after which copies are old.

        Raises:
            UsageError: somebody has written into one of before the last update.
        """
        self.take()
        for former, version in self._former:
            values = former()
            if values is not None and values._version != version:
                raise UsageError(
                    f"a tensor of shape {tuple(values.shape)} that parameter.data or "
                    "parameter.detach() returned before the last update was written: with half "
                    "weights and gradients.transport sharded it is a copy, which counts until the "
                    "next update; read parameter.data again after each update"
                )
        self._former = [(ref(c.values), c.version) for c in self._copies.values()]
        self._copies.clear()
