"""16-bit parameters and their fp32 masters: which of the two a parameter is, and that they agree.

[Note: Reading and writing from outside]
A parameter that has a master is of a subclass of its class. Outside of the model's own computing
(its forward and backward), ``parameter.data`` and ``parameter.detach()``, by which averages,
clippings and initialisations read and write, are the master. torch counts no writes through
``parameter.data``; through these tensors it does, so master and 16-bit values can follow each
other. Optimizers see parameters of their own class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from slipstream.errors import UsageError

ShareOf = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]
"""From a parameter, and a tensor laid out like it, to a view of the part that this rank updates."""

_DATA: Any = cast(Any, torch.Tensor).data
_GRAD: Any = cast(Any, torch.Tensor).grad


def everything(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """This rank updates the whole parameter."""
    return tensor.detach()


def wide(tensor: torch.Tensor, former: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in fp32: ``former``, except where ``tensor`` differs from its rounding."""
    current = tensor.detach()
    if former is None or former.shape != current.shape:
        return current.float()
    same = former.to(dtype) == current
    return former.detach() if same.all() else torch.where(same, former, current.float())


class Masters:
    """The 16-bit parameters of a model.

    Args:
        dtype: with 16 bits.
        share_of: what this rank updates; it has the masters of that alone.

    Attributes:
        values: masters by parameter.
        halves: 16-bit values by parameter; their memory never changes.
        stepping: parameters whose data is the master now.
        depth: of calls of the model that are under way.
    """

    def __init__(self, dtype: torch.dtype, share_of: ShareOf) -> None:
        self._dtype, self.share_of = dtype, share_of
        self.values: dict[nn.Parameter, torch.Tensor] = {}
        self.halves: dict[nn.Parameter, torch.Tensor] = {}
        self.stepping: list[nn.Parameter] = []
        self.depth = 0
        self._versions: dict[nn.Parameter, tuple[int, int, int]] = {}
        self._kinds: dict[Any, Any] = {}

    def add(self, parameter: nn.Parameter, before: torch.Tensor) -> None:
        """A parameter is 16-bit from now on; ``before``: its values until now."""
        self.values[parameter] = self.share_of(parameter, before.float()).clone()
        self.halves[parameter] = _DATA.__get__(parameter)
        self._is_half(parameter)

    def release(self, parameter: nn.Parameter) -> None:
        """Give a parameter its own class back."""
        if type(parameter) in self._kinds.values():
            parameter.__class__ = type(parameter).__base__  # type: ignore[assignment]

    @torch.no_grad()
    def swap_in(self, held: Iterable[nn.Parameter]) -> None:
        """The data of these parameters is the master, until `swap_out`."""
        stepping = [p for p in held if p in self.values]
        self.follow(stepping)
        self.stepping = stepping
        for parameter in stepping:
            _DATA.__set__(parameter, self.values[parameter])
            self.release(parameter)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Round the masters into the 16-bit values."""
        if not self.stepping:
            return
        halves = [self.share_of(p, self.halves[p]) for p in self.stepping]
        torch._foreach_copy_(halves, [self.values[p] for p in self.stepping])
        for parameter in self.stepping:
            _DATA.__set__(parameter, self.halves[parameter])
            self._is_half(parameter)
        self.stepping = []

    def follow(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Make masters and 16-bit values agree, where one of them was written."""
        if self.stepping:
            return
        for parameter in self.values if parameters is None else parameters:
            before, now = self._versions[parameter], self._versions_of(parameter)
            if now == before:
                continue
            master, half = self.values[parameter], self.halves[parameter]
            with torch.no_grad():
                own = self.share_of(parameter, half)
                if now[2] != before[2]:
                    own.copy_(master)
                else:
                    master.copy_(wide(own, master, self._dtype))
            self._versions[parameter] = self._versions_of(parameter)

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """``parameter`` in fp32; of what other ranks update, the rounded values."""
        master = self.values.get(parameter)
        if master is None:
            return parameter.detach().float()
        self.follow([parameter])
        if master.shape == parameter.shape:
            return master.detach()
        whole = parameter.detach().float()  # waits for values that are on their way
        self.share_of(parameter, whole).copy_(master)
        return whole

    def join(self, gather: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> None:
        """Make all masters whole: ``gather`` returns that of a parameter from this rank's part."""
        self.follow()
        self.values = {p: gather(p, master) for p, master in self.values.items()}
        self._versions = {p: self._versions_of(p) for p in self.values}
        self.share_of = everything

    # From outside; see the note at the top of the file.

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        if self.depth or in_backward or self.share_of is not everything:
            return self.halves[parameter].detach()
        self.follow([parameter])
        return self.values[parameter].detach()

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """``parameter.data = values``: its memory stays, and what is new counts."""
        half, master = self.halves[parameter], self.values[parameter]
        if values.shape != half.shape or values.device != half.device:
            raise UsageError(
                f"the data of a parameter was set to a tensor of shape {tuple(values.shape)} on "
                f"{values.device}; allowed with half weights: {tuple(half.shape)} on {half.device}"
                "; do it before half_weights or accelerate(), or after close()"
            )
        self.follow([parameter])
        new = self.share_of(parameter, torch.empty_like(half, dtype=torch.float32).copy_(values))
        same = self.share_of(parameter, half).float() == new
        master.copy_(torch.where(same, master, new))
        half.copy_(values)
        self._versions[parameter] = self._versions_of(parameter)

    def _is_half(self, parameter: nn.Parameter) -> None:
        """The data of a parameter are its 16-bit values, which agree with the master."""
        self._versions[parameter] = self._versions_of(parameter)
        kind = type(parameter)
        if kind not in self._kinds:
            self._kinds[kind] = _seen_from_outside(kind, self._read, self._write)
        parameter.__class__ = self._kinds[kind]

    def _versions_of(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        half, master = self.halves[parameter], self.values[parameter]
        return parameter._version, half._version, master._version


def _seen_from_outside(
    kind: type[nn.Parameter],
    read: Callable[[nn.Parameter], torch.Tensor],
    write: Callable[[nn.Parameter, torch.Tensor], None],
) -> Any:
    """A subclass of ``kind`` whose ``data`` is what ``read`` returns and ``write`` takes."""

    def data(self: nn.Parameter) -> torch.Tensor:
        return read(self)

    def grad(self: nn.Parameter) -> Any:
        return _GRAD.__get__(self)

    def set_grad(self: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.dtype == self.dtype:
            gradient = gradient.float()  # made like the parameter
        _GRAD.__set__(self, gradient)

    def delete_grad(self: nn.Parameter) -> None:
        _GRAD.__delete__(self)

    members = {
        "data": property(data, write),
        "detach": data,
        "grad": property(grad, set_grad, delete_grad),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)
