"""16-bit parameters and their fp32 masters: which of the two a parameter is, and that they agree.

[Note: Reading and writing from outside]
A parameter that has a master is of a subclass of its class. Outside of the model's own computing
(its forward and backward), ``parameter.data`` and ``parameter.detach()``, by which averages,
clippings and initialisations read and write, are the master, and
``parameter.clone()`` is a copy of it. torch counts no writes through
``parameter.data``; through these tensors it does, so master and 16-bit values can follow each
other. Where this rank has a part of the master alone, they are a copy (``whole_copies``).
Optimizers see parameters of their own class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.precision.whole_copies import WholeCopies

ShardOf = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]
"""From a parameter, and a tensor laid out like it, to a view of the part that this rank updates."""

_DATA: Any = cast(Any, torch.Tensor).data
_GRAD: Any = cast(Any, torch.Tensor).grad
_NEW_PARAMETER = nn.Parameter.__new__.__code__


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
        shard_of: what this rank updates; it has the masters of that alone.

    Attributes:
        values: masters by parameter.
        halves: 16-bit values by parameter; their memory never changes.
        stepping: parameters whose data is the master now.
        depth: of calls of the model that are under way.
    """

    def __init__(self, dtype: torch.dtype, shard_of: ShardOf) -> None:
        self._dtype, self.shard_of = dtype, shard_of
        self.values: dict[nn.Parameter, torch.Tensor] = {}
        self.halves: dict[nn.Parameter, torch.Tensor] = {}
        self.stepping: list[nn.Parameter] = []
        self.depth = 0
        self._versions: dict[nn.Parameter, int] = {}
        # Of halves and masters that may be written from outside, as somebody has read them.
        self._shown: dict[nn.Parameter, tuple[int, int]] = {}
        # Masters that 16-bit values replaced since the last step: if those come back, as after an
        # evaluation of averages, their masters do, too.
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._kinds: dict[Any, Any] = {}
        # Versions of frozen halves that the model has read while it computes.
        self._lent: dict[nn.Parameter, int] = {}
        self._copies = WholeCopies(self._copied, self._write, self._stamp)

    def add(self, parameter: nn.Parameter, before: torch.Tensor) -> None:
        """A parameter is 16-bit from now on; ``before``: its values until now."""
        self.values[parameter] = self.shard_of(parameter, before.float()).clone()
        self.halves[parameter] = _DATA.__get__(parameter)
        self._is_half(parameter)

    def release(self, parameter: nn.Parameter) -> None:
        """Give a parameter its own class back."""
        if type(parameter) in self._kinds.values():
            parameter.__class__ = type(parameter).__base__  # type: ignore[assignment]

    @torch.no_grad()
    def swap_in(self, held: Iterable[nn.Parameter]) -> None:
        """The data of these parameters is the master, until `swap_out`."""
        self._copies.end()
        stepping = [p for p in held if p in self.values]
        self.follow(stepping)
        self._before.clear()
        self.stepping = stepping
        for parameter in stepping:
            _DATA.__set__(parameter, self.values[parameter])
            self.release(parameter)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Round the masters, which are what a step has set ``data`` to, into the 16-bit values."""
        if not self.stepping:
            return
        for parameter in self.stepping:
            if parameter.data_ptr() != self.values[parameter].data_ptr():
                self.values[parameter] = _DATA.__get__(parameter).float()
        halves = [self.shard_of(p, self.halves[p]) for p in self.stepping]
        torch._foreach_copy_(halves, [self.values[p] for p in self.stepping])
        for parameter in self.stepping:
            _DATA.__set__(parameter, self.halves[parameter])
            self._is_half(parameter)
        self.stepping = []

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make masters and 16-bit values agree, where one of them was written."""
        if self.stepping:
            return
        for parameter in parameters:
            if self._master_written(parameter):
                self._from_master(parameter)
            elif self._half_written(parameter):
                master, newest = self.values[parameter], self._newest(parameter)
                self._before.setdefault(parameter, master.clone())
                with torch.no_grad():
                    master.copy_(newest)
                self._agree(parameter)

    def _master_written(self, parameter: nn.Parameter) -> bool:
        shown = self._shown.get(parameter)
        return shown is not None and self.values[parameter]._version != shown[1]

    def _half_written(self, parameter: nn.Parameter) -> bool:
        shown = self._shown.get(parameter)
        written = shown is not None and self.halves[parameter]._version != shown[0]
        return written or parameter._version != self._versions[parameter]

    def _newest(self, parameter: nn.Parameter) -> torch.Tensor:
        """The part of this rank in fp32: the master, but for 16-bit values that were written."""
        master = self.values[parameter]
        if self.stepping or self._master_written(parameter) or not self._half_written(parameter):
            return master.detach()
        own = self.shard_of(parameter, self.halves[parameter])
        newest, before = wide(own, master, self._dtype), self._before.get(parameter)
        if before is not None:
            back = (before.to(self._dtype) == own) & (master.to(self._dtype) != own)
            newest = torch.where(back, before, newest)
        return newest

    def refresh(self) -> None:
        """Round masters that were written through ``data``, before the model computes."""
        self._copies.take()
        for parameter in self._shown:
            if self._master_written(parameter):
                self._from_master(parameter)

    @torch.no_grad()
    def _from_master(self, parameter: nn.Parameter) -> None:
        self.shard_of(parameter, self.halves[parameter]).copy_(self.values[parameter])
        self._agree(parameter)

    def _agree(self, parameter: nn.Parameter) -> None:
        self._versions[parameter] = parameter._version
        if parameter in self._shown:
            self._show(parameter)

    def _show(self, parameter: nn.Parameter) -> None:
        versions = self.halves[parameter]._version, self.values[parameter]._version
        self._shown[parameter] = versions

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """``parameter`` in fp32; of what other ranks update, the rounded values."""
        self._copies.take(parameter)
        master = self.values.get(parameter)
        if master is None:
            return torch.Tensor.detach(parameter).float()
        newest = self._newest(parameter)
        if master.shape == parameter.shape:
            return newest
        whole = torch.Tensor.detach(parameter).float()  # waits for values that are on their way
        self.shard_of(parameter, whole).copy_(newest)
        return whole

    def _copied(self, parameter: nn.Parameter) -> torch.Tensor:
        whole, master = self.whole(parameter), self.values[parameter]
        return whole.clone() if whole.data_ptr() == master.data_ptr() else whole

    def join(self, gather: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> None:
        """Make all masters whole: ``gather`` returns that of a parameter from this rank's part."""
        self._copies.end()
        self.follow(self.values)
        self.values = {p: gather(p, master) for p, master in self.values.items()}
        for parameter in self._shown:
            self._show(parameter)
        self.shard_of = everything

    def written_inside(self) -> set[nn.Parameter]:
        """Find frozen parameters that the model has written through ``data`` while it computed, as
        it keeps an average: that moves by less than 16 bits can tell."""
        lent, self._lent = self._lent, {}
        return {p for p, version in lent.items() if self.halves[p]._version != version}

    # From outside; see the note at the top of the file.

    @property
    def _outside(self) -> bool:
        in_backward = torch._C._current_graph_task_id() != -1
        return not self.depth and not in_backward

    def _stamp(self, parameter: nn.Parameter) -> tuple[int, ...]:
        half, master = self.halves[parameter], self.values[parameter]
        return half._version, master._version, parameter._version

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        outside = self._outside
        if outside:
            self.follow([parameter])
            if self.shard_of is not everything:
                return self._copies.of(parameter)
        elif self.depth and not parameter.requires_grad:
            self._lent.setdefault(parameter, self.halves[parameter]._version)
        if parameter not in self._shown:
            self._show(parameter)
        return (self.values if outside else self.halves)[parameter].detach()

    def _assign(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        self._copies.replace(parameter, values)
        self._write(parameter, values)

    def _clone(self, parameter: nn.Parameter, **options: Any) -> torch.Tensor:
        cloned = torch.Tensor.clone(parameter, **options)
        if not self._outside:
            return cloned
        wide = cloned.float()  # with the graph of the 16-bit values
        return wide + (self._read(parameter) - wide).detach()

    def _detach(self, parameter: nn.Parameter) -> torch.Tensor:
        if sys._getframe(2).f_code is _NEW_PARAMETER:
            raise UsageError(
                f"nn.Parameter(...) of a parameter of shape {tuple(parameter.shape)} that has "
                "16-bit values and an fp32 master, as weight_norm and other parametrizations make "
                "it; do it before half_weights or accelerate(), or after close()"
            )
        # inside, what autograd saves must count the writes of the parameter itself
        return self._read(parameter) if self._outside else torch.Tensor.detach(parameter)

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """``parameter.data = values``: what is new counts. The master's memory is another one, as
        the former may be kept as what to restore; that of the 16-bit values stays."""
        half = self.halves[parameter]
        if values.shape != half.shape or values.device != half.device:
            raise UsageError(
                f"the data of a parameter was set to a tensor of shape {tuple(values.shape)} on "
                f"{values.device}; allowed with half weights: {tuple(half.shape)} on {half.device}"
                "; do it before half_weights or accelerate(), or after close()"
            )
        self.follow([parameter])
        new = self.shard_of(parameter, torch.empty_like(half, dtype=torch.float32).copy_(values))
        same = self.shard_of(parameter, half).float() == new
        self.values[parameter] = torch.where(same, self.values[parameter], new)
        half.copy_(values)
        self._agree(parameter)

    def _is_half(self, parameter: nn.Parameter) -> None:
        """The data of a parameter are its 16-bit values, which agree with the master."""
        self._agree(parameter)
        kind = type(parameter)
        if kind not in self._kinds:
            seen = self._read, self._assign, self._detach, self._clone
            self._kinds[kind] = _seen_from_outside(kind, *seen)
        parameter.__class__ = self._kinds[kind]


def _seen_from_outside(
    kind: type[nn.Parameter],
    read: Callable[[nn.Parameter], torch.Tensor],
    write: Callable[[nn.Parameter, torch.Tensor], None],
    detached: Callable[[nn.Parameter], torch.Tensor],
    cloned: Callable[..., torch.Tensor],
) -> Any:
    """A subclass of ``kind`` whose ``data`` is what ``read`` returns and ``write`` takes."""

    def data(self: nn.Parameter) -> torch.Tensor:
        return read(self)

    def detach(self: nn.Parameter) -> torch.Tensor:
        return detached(self)

    def clone(self: nn.Parameter, **options: Any) -> torch.Tensor:
        return cloned(self, **options)

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
        "detach": detach,
        "clone": clone,
        "grad": property(grad, set_grad, delete_grad),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)
