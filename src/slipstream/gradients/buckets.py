"""Where gradients wait for their exchange, and where the averages come back.

Never communicates by itself: the transport and the group come from the engine.

[Note: Flags of use]
A parameter that got a gradient on some rank must be updated on all ranks, one that got none on any
rank on none (an optimizer would still decay it or apply momentum). Which is which is known only
after all ranks spoke, so the flat tensor carries one more element a gradient: 1 where this rank has
one. Their sum comes back with the gradients: no further collective, and no rank waits for another's
graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from slipstream.codecs.compressor import is_dense, is_finite, memory_order, parts
from slipstream.transport import sparse

SMALL_GRADIENT = 64 * 1024
"""Bytes a gradient, on average in a bucket, below which the calls cost more than the copies."""


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The type of its gradient: fp32 where half weights have fp32 masters, else its own.

    Example:
        >>> gradient_dtype(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
        torch.bfloat16
    """
    return parameter.grad_dtype or parameter.dtype


Transport = Callable[[torch.Tensor, dist.ProcessGroup], Sequence[dist.Work]]


class Bucket(ABC):
    """Gradients that travel together: ``fill`` one by one, ``complete``, exchange, ``finish``."""

    may_overflow = False
    """Whether what travels is fp16: finite gradients may have an infinite sum, and a loss scale
    stays on."""

    num_bytes: int
    """Bytes of this rank's gradients, flags of use left out; 0 where it is not known beforehand."""

    @abstractmethod
    def fill(self, slot: int, scale: torch.Tensor) -> None:
        """Take over the gradient of the parameter in ``slot``, times ``scale`` (of no axes)."""

    @abstractmethod
    def complete(self, scale: torch.Tensor) -> None:
        """Fill what is missing: gradients of earlier backward passes, else zeros."""

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """Whether the sum is finite, on all ranks alike."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the sum in ``parameter.grad``, or None where no rank had a gradient."""


class DenseBucket(Bucket):
    """One flat tensor: gradients of one dtype, then one flag a gradient.

    ``parameter.grad`` becomes a view of it, in the parameter's own memory format; where the flat
    tensor has another dtype, the one that travels, of a second one to which averages are copied
    back, and which holds old values until then. (Memory that autograd has to allocate anew in every
    step costs more than the copy.) Large gradients are copied one by one, as they come out of the
    cache; small ones all at once, in a quarter of the calls.

    Args:
        parameters: of one dtype, as their gradients are.
        dtype: of the flat tensor, real; None: the gradients' own.
        padded: its length in front of the flags; None: as many values as the gradients have.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype | None = None,
        padded: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        first = parameters[0]
        own = gradient_dtype(first)
        pairs = first.is_complex() and dtype is not None
        sizes = [p.numel() * (2 if pairs else 1) for p in parameters]
        rest = 0 if padded is None else padded - sum(sizes)
        self.flat = torch.zeros(
            sum(sizes) + rest + len(sizes),
            dtype=dtype or own,
            device=first.device,
            requires_grad=False,
        )
        *parts, _, self._flags = self.flat.split([*sizes, rest, len(sizes)])
        self._copies_back = dtype not in (None, own, own.to_real())
        self._views = [
            _pairs(part, p, self._copies_back) if pairs else _shaped_like(part, p)
            for part, p in zip(parts, parameters, strict=True)
        ]
        self._grads = self._views
        if self._copies_back:
            averages = torch.zeros(
                sum(p.numel() for p in parameters), dtype=own, device=first.device
            )
            own_parts = averages.split([p.numel() for p in parameters])
            self._grads = [
                _shaped_like(part, p) for part, p in zip(own_parts, parameters, strict=True)
            ]
        self.may_overflow = self._copies_back and self.flat.dtype == torch.float16
        self._widens = self.flat.itemsize > own.itemsize
        self._filled: set[int] = set()
        self._unused: list[int] = []
        self.num_bytes = sum(p.nbytes for p in parameters)
        self._small = self.num_bytes < SMALL_GRADIENT * len(sizes)

    def fill(self, slot: int, scale: torch.Tensor) -> None:
        if not self._small:
            view, gradient = self._views[slot], self._gradient(slot)
            if self._widens:  # what is too small for 16 bits once scaled must not be lost
                view.copy_(gradient).mul_(scale)
            elif self._copies_back:
                _cast(gradient, scale, view)
            else:
                torch.mul(gradient, scale, out=view)
            self.parameters[slot].grad = self._grads[slot]
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

    def _fill_together(self, scale: torch.Tensor) -> None:
        """What ``fill`` does one by one, bit for bit."""
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
            self.parameters[slot].grad = self._grads[slot]

    def _gradient(self, slot: int) -> torch.Tensor:
        """The gradient, dense, of as many axes as its place in the flat tensor."""
        gradient = _dense(self.parameters[slot])
        if gradient.is_complex() and not self._views[slot].is_complex():
            return torch.view_as_real(gradient.resolve_conj())
        return gradient

    def start(self, transport: Transport, group: dist.ProcessGroup) -> Sequence[dist.Work]:
        """Begin the sum over ranks."""
        return transport(self.flat, group)

    @property
    def is_finite(self) -> bool:
        return is_finite(self.flat)

    def finish(self) -> None:
        absent: set[int] = set()
        if self._unused:
            used = self._flags.real.tolist() if self._flags.is_complex() else self._flags.tolist()
            absent = {slot for slot in self._unused if not used[slot]}
        for slot in range(len(self.parameters)) if self._copies_back else self._unused:
            self.parameters[slot].grad = None if slot in absent else self._grads[slot]
        present = [slot for slot in range(len(self.parameters)) if slot not in absent]
        if self._copies_back and present:
            torch._foreach_copy_(
                [self._gradient(slot) for slot in present], [self._views[slot] for slot in present]
            )

    def unscale(self, loss_scale: float) -> None:
        """Take a loss scale off the sum in ``parameter.grad``."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients and loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1 / loss_scale)


def _cast(gradient: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """The gradient times ``scale`` in another dtype, rounded once.

    In one call it takes longer on a CPU; in two, what lies between them should stay in its cache.
    """
    if gradient.stride() != out.stride() or not is_dense(gradient):
        out.copy_(gradient * scale)
        return
    flat, to = memory_order(gradient), memory_order(out)
    for part in parts(flat.numel(), flat.device):
        to[part].copy_(flat[part] * scale)


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, which may be sparse although it was dense when the buckets were laid out."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


class SparseBucket(Bucket):
    """The gradient of one parameter that is a sparse tensor of ``sparse_dim`` sparse axes."""

    num_bytes = 0

    def __init__(self, parameter: nn.Parameter, sparse_dim: int) -> None:
        self.parameter = parameter
        self._sparse_dim = sparse_dim
        self._gradient: torch.Tensor | None = None

    def fill(self, slot: int, scale: torch.Tensor) -> None:
        gradient = self.parameter.grad
        assert gradient is not None
        if not gradient.is_sparse:  # a rank or a step whose graph also uses the parameter densely
            gradient = gradient.to_sparse(self._sparse_dim)
        self._gradient = gradient * scale

    def complete(self, scale: torch.Tensor) -> None:
        if self._gradient is None and self.parameter.grad is not None:
            self.fill(0, scale)

    def exchange(self, group: dist.ProcessGroup) -> None:
        """Sum over ranks: several collectives, as the number of rows differs between ranks."""
        used = self._gradient is not None
        own = self._gradient if self._gradient is not None else self._no_rows()
        self._gradient = sparse.all_reduce_sum(own, group, used=used)

    @property
    def is_finite(self) -> bool:
        return self._gradient is None or is_finite(self._gradient._values())

    def finish(self) -> None:
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


def make_buckets(
    parameters: Sequence[nn.Parameter],
    sparse_dims: Sequence[int],
    dense: Callable[[Sequence[int]], DenseBucket],
    kinds: Sequence[object],
) -> list[tuple[Bucket, list[int]]]:
    """Buckets for the parameters of one segment, each with the positions it holds, by slot.

    One flat tensor a dtype and kind, made by ``dense`` of positions; one bucket for each sparse
    gradient (``sparse_dims`` above 0).
    """
    positions_of: dict[tuple[torch.dtype, object], list[int]] = {}
    buckets: list[tuple[Bucket, list[int]]] = []
    for position, (parameter, sparse_dim) in enumerate(zip(parameters, sparse_dims, strict=True)):
        if sparse_dim:
            buckets.append((SparseBucket(parameter, sparse_dim), [position]))
        else:
            positions_of.setdefault((parameter.dtype, kinds[position]), []).append(position)
    buckets += [(dense(positions), positions) for positions in positions_of.values()]
    return buckets


def _shaped_like(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A view of ``part`` with the parameter's shape and, where these leave no holes, strides."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride())


def _pairs(part: torch.Tensor, parameter: nn.Parameter, stay: bool) -> torch.Tensor:
    """A view of real values with the shape of complex ones, if they do not ``stay`` pairs."""
    pairs = part.view(*parameter.shape, 2)
    return pairs if stay else torch.view_as_complex(pairs)
