"""Buckets: flat tensors that collect gradients for an exchange and receive the averages.

Never communicates: a bucket says what is to be exchanged, the engine hands that to the channel.

[Note: Flags of use]
A parameter that got a gradient on some rank must be updated on all ranks, and one that got none on
any rank on no rank (an optimizer would still decay it or apply momentum). No rank knows alone which
is which, so the flat tensor carries one more element for each gradient: 1 where this rank has one.
Their sum comes back with the gradients, without another collective. Where a rank's gradients are
not finite, its flags are NaN: so all ranks know it, and each knows whether it was that rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import nn

from slipstream.codecs.compressor import any_infinite, is_dense, is_finite, memory_order, parts
from slipstream.gradients.messages import gradient_came_late, gradient_taken
from slipstream.transport import sparse
from slipstream.transport.requests import AllReduce, ExchangeSteps, Request

SMALL_GRADIENT = 64 * 1024
"""Average bytes of a bucket's gradients below which calls cost more than copies."""


_OWN_REFERENCES = max(map(getrefcount, [object()]))
"""References to what a list alone holds, as many as `map` adds in this Python."""


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of its gradient: fp32 where half weights have fp32 masters, else its own.

    Example:
        >>> gradient_dtype(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
        torch.bfloat16
    """
    return parameter.grad_dtype or parameter.dtype


class Bucket(ABC):
    """Gradients that travel together: ``fill`` one by one, ``complete``, exchange, ``finish``."""

    parameters: list[nn.Parameter]
    may_overflow = False
    """Whether gradients travel as fp16: finite ones may have an infinite sum, and the loss scale is
    taken off only after the exchange."""

    nonfinite_here: torch.Tensor
    """Whether `look` has found infinite values or NaN; 0-dimensional: no device is waited for."""

    gone: set[int]
    """Slots whose gradients are on their way, so that their parameters have none."""

    num_bytes: int
    """Bytes of this rank's gradients without the flags of use; 0 where unknown beforehand."""

    def part_from_script(self) -> None:  # noqa: B027 - others lend no memory
        """Give the script memory of its own before an exchange: for gradients of the last one that
        it has kept themselves (views of them are the bucket's), and where it has set ``data``."""

    def check_gone(self) -> None:
        """Refuse gradients that came when those of this rank were on their way.

        Raises:
            UsageError: a hook of the script has set one.
        """
        for slot in self.gone:
            if self.parameters[slot].grad is not None:
                shape = tuple(self.parameters[slot].shape)
                raise gradient_came_late(f"a parameter of shape {shape}")

    @abstractmethod
    def fill(self, slot: int, scale: torch.Tensor) -> None:
        """Copy the gradient of the parameter in ``slot``, times ``scale`` (0-dimensional)."""

    @abstractmethod
    def complete(self, scale: torch.Tensor) -> None:
        """Fill the slots that are missing: with gradients of earlier backwards, else with zeros."""

    @abstractmethod
    def look(self) -> None:
        """Look whether this rank's gradients, which are complete, are finite; tell all ranks."""

    @property
    @abstractmethod
    def nonfinite(self) -> torch.Tensor:
        """Whether some rank's gradients, or their sum, are not finite: before ``finish``, on all
        ranks alike, where all have looked; 0-dimensional."""

    @abstractmethod
    def exchange(self, step: int) -> Request | ExchangeSteps:
        """Leave the sum over ranks in the bucket; ``step`` updates were done before."""

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """Whether the sum is finite, on all ranks alike."""

    @abstractmethod
    def finish(self, loss_scale: float) -> None:
        """Leave the sum in ``parameter.grad``, or None where no rank had a gradient; divided by the
        loss scale that it still has, if it ``may_overflow``."""


class DenseBucket(Bucket):
    """One flat tensor: gradients of one dtype, then one flag for each.

    ``parameter.grad`` becomes a view of the flat tensor in the parameter's memory format. Where
    gradients travel in another dtype, it becomes a view of a second flat tensor, into which
    averages are copied back, and which holds old values until then. Between ``fill`` and ``finish``
    it is None, so that no hook of the script changes what is on its way. (Letting autograd allocate
    gradients anew in every step costs more than that copy.) Large gradients are copied one by one
    while they are in the cache; small ones all at once, in a quarter of the calls.

    Args:
        parameters: of one dtype, as their gradients are.
        dtype: of the flat tensor, real; None: the gradients' own.
        padded: length of the flat tensor without flags; None: no padding.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype | None = None,
        padded: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        first = parameters[0]
        grad_dtype = gradient_dtype(first)
        pairs = first.is_complex() and dtype is not None
        sizes = [p.numel() * (2 if pairs else 1) for p in parameters]
        padding = 0 if padded is None else padded - sum(sizes)
        self.flat = torch.zeros(
            sum(sizes) + padding + len(sizes),
            dtype=dtype or grad_dtype,
            device=first.device,
            requires_grad=False,
        )
        *parts, _, self._flags = self.flat.split([*sizes, padding, len(sizes)])
        self._copies_back = dtype not in (None, grad_dtype, grad_dtype.to_real())
        self._views = [
            _pairs(part, p, self._copies_back) if pairs else _shaped_like(part, p)
            for part, p in zip(parts, parameters, strict=True)
        ]
        averages = self._views
        if self._copies_back:
            numels = [p.numel() for p in parameters]
            flat = torch.zeros(sum(numels), dtype=grad_dtype, device=first.device)
            averages = [
                _shaped_like(part, p)
                for part, p in zip(flat.split(numels), parameters, strict=True)
            ]
        self._averages = averages  # the script has others of this memory
        self._grads = [average.detach() for average in averages]
        self._places = [average.data_ptr() for average in averages]
        self.may_overflow = self._copies_back and self.flat.dtype == torch.float16
        self._widens = self.flat.itemsize > grad_dtype.itemsize
        self._filled, self.gone = set[int](), set[int]()
        self._unused: list[int] = []
        self.num_bytes = sum(p.nbytes for p in parameters)
        self._small = self.num_bytes < SMALL_GRADIENT * len(sizes)

    def part_from_script(self) -> None:
        kept = [count > _OWN_REFERENCES for count in map(getrefcount, self._grads)]
        places = [gradient.data_ptr() for gradient in self._grads]
        if places == self._places and not any(kept):  # each small layer would feel what follows
            return
        for slot, parameter in enumerate(self.parameters):
            gradient = self._grads[slot]
            if places[slot] == self._places[slot]:
                if not kept[slot] or parameter.grad is gradient:
                    continue
                gradient.data = gradient.clone()
            self._grads[slot] = self._averages[slot].detach()

    def fill(self, slot: int, scale: torch.Tensor) -> None:
        if not self._small:
            view, gradient = self._views[slot], self._gradient(slot)
            scale_into(view, gradient, scale)
            self.parameters[slot].grad = None
            self.gone.add(slot)
        self._filled.add(slot)

    def complete(self, scale: torch.Tensor) -> None:
        self._unused = []
        if len(self._filled) < len(self.parameters):
            for slot in set(range(len(self.parameters))) - self._filled:
                if self.parameters[slot].grad is not None:
                    self.fill(slot, scale)
                else:
                    self._views[slot].zero_()
                    self._unused.append(slot)
        if self._small:
            self._fill_together(scale)
        self._flags.fill_(1)
        for slot in self._unused:
            self._flags[slot] = 0
        self._filled.clear()

    def look(self) -> None:
        self.nonfinite_here = any_infinite(self.flat)
        self._flags.masked_fill_(self.nonfinite_here, torch.nan)

    @property
    def nonfinite(self) -> torch.Tensor:
        found: torch.Tensor = self._flags.isnan().any()
        return found | any_infinite(self.flat) if self.may_overflow else found

    def _fill_together(self, scale: torch.Tensor) -> None:
        """Copy all small gradients; bitwise what ``fill`` does with them one by one."""
        unused = set(self._unused)
        used = [slot for slot in range(len(self.parameters)) if slot not in unused]
        if not used:
            return
        views, gradients = [self._views[i] for i in used], [self._gradient(i) for i in used]
        if self._copies_back and not self._widens:
            torch._foreach_copy_(views, torch._foreach_mul(gradients, scale))
        else:
            torch._foreach_copy_(views, gradients)
            self.flat.mul_(scale)
        for slot in used:
            self.parameters[slot].grad = None
        self.gone.update(used)

    def _gradient(self, slot: int) -> torch.Tensor:
        """The gradient, dense, with as many axes as its view of the flat tensor."""
        gradient = _dense(self.parameters[slot])
        if gradient.is_complex() and not self._views[slot].is_complex():
            return torch.view_as_real(gradient.resolve_conj())
        return gradient

    def exchange(self, step: int) -> AllReduce | ExchangeSteps:
        return AllReduce(self.flat)

    @property
    def is_finite(self) -> bool:
        return is_finite(self.flat)

    def finish(self, loss_scale: float) -> None:
        absent: set[int] = set()
        if self._unused:
            used = self._flags.real.tolist() if self._flags.is_complex() else self._flags.tolist()
            absent = {slot for slot in self._unused if not used[slot]}
        for slot, (parameter, gradient) in enumerate(
            zip(self.parameters, self._grads, strict=True)
        ):
            parameter.grad = None if slot in absent else gradient
        self.gone.clear()
        if not self._copies_back:  # nor can it overflow
            return
        present = [slot for slot in range(len(self.parameters)) if slot not in absent]
        if present:
            torch._foreach_copy_(
                [self._gradient(slot) for slot in present], [self._views[slot] for slot in present]
            )
        if self.may_overflow and loss_scale != 1.0 and present:
            torch._foreach_mul_([self._grads[slot] for slot in present], 1 / loss_scale)


def scale_into(out: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor | float) -> None:
    """Write the gradient times ``scale`` into ``out``, in its dtype, rounded once.

    torch's single call that scales and casts is slower on a CPU than two calls, as long as what
    lies between them stays in the cache: hence part by part.
    """
    if out.dtype == gradient.dtype:
        torch.mul(gradient, scale, out=out)
    elif out.itemsize > gradient.itemsize:  # scaled in 16 bits, small values would be lost
        out.copy_(gradient).mul_(scale)
    elif gradient.stride() != out.stride() or not is_dense(gradient):
        out.copy_(gradient * scale)
    else:
        flat, to = memory_order(gradient), memory_order(out)
        for part in parts(flat.numel(), flat.device):
            to[part].copy_(flat[part] * scale)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient that backward has just left.

    Raises:
        UsageError: a hook of the script has taken it.
    """
    if parameter.grad is None:
        raise gradient_taken(f"a parameter of shape {tuple(parameter.shape)}")
    return parameter.grad


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, which may be sparse although it was dense when buckets were laid out."""
    gradient = gradient_of(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


class SparseBucket(Bucket):
    """The gradient of one parameter that is a sparse tensor of ``sparse_dim`` sparse axes."""

    num_bytes = 0

    def __init__(self, parameter: nn.Parameter, sparse_dim: int, num_ranks: int) -> None:
        self.parameter, self.parameters, self.gone = parameter, [parameter], set()
        self._sparse_dim, self._num_ranks = sparse_dim, num_ranks
        self._gradient: torch.Tensor | None = None

    def fill(self, slot: int, scale: torch.Tensor) -> None:
        gradient = gradient_of(self.parameter)
        if not gradient.is_sparse:  # a rank or a step whose graph also uses the parameter densely
            gradient = gradient.to_sparse(self._sparse_dim)
        self._gradient = gradient * scale

    def complete(self, scale: torch.Tensor) -> None:
        if self._gradient is None and self.parameter.grad is not None:
            self.fill(0, scale)

    def look(self) -> None:
        self.nonfinite_here = self.nonfinite

    @property
    def nonfinite(self) -> torch.Tensor:
        if self._gradient is None:
            return torch.zeros((), dtype=torch.bool, device=self.parameter.device)
        return any_infinite(self._gradient._values())

    def exchange(self, step: int) -> ExchangeSteps:
        """Several requests, as the number of rows differs between ranks."""
        mine = self._no_rows() if self._gradient is None else self._gradient
        used = self._gradient is not None
        self._gradient = yield from sparse.sum_over_ranks(mine, self._num_ranks, used=used)

    @property
    def is_finite(self) -> bool:
        return self._gradient is None or is_finite(self._gradient._values())

    def finish(self, loss_scale: float) -> None:
        self.parameter.grad, self._gradient = self._gradient, None

    def _no_rows(self) -> torch.Tensor:
        shape, device = self.parameter.shape, self.parameter.device
        dtype = gradient_dtype(self.parameter)
        return torch.sparse_coo_tensor(
            torch.empty(self._sparse_dim, 0, dtype=torch.int64, device=device),
            torch.empty(0, *shape[self._sparse_dim :], dtype=dtype, device=device),
            shape,
            check_invariants=False,
        )


def _shaped_like(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A view of ``part`` with the parameter's shape, and its strides if these leave no holes."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride())


def _pairs(part: torch.Tensor, parameter: nn.Parameter, stay: bool) -> torch.Tensor:
    """A view of pairs of real values as complex ones, or, if they ``stay`` real, as pairs."""
    pairs = part.view(*parameter.shape, 2)
    return pairs if stay else torch.view_as_complex(pairs)
