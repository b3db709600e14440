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

from slipstream.comm import sparse

SMALL_GRADIENT = 64 * 1024
"""Bytes a gradient, on average in a bucket, below which the calls cost more than the copies."""

Transport = Callable[[torch.Tensor, dist.ProcessGroup], Sequence[dist.Work]]


class Bucket(ABC):
    """Gradients that travel together: ``fill`` one by one, ``complete``, exchange, ``finish``."""

    num_bytes: int
    """Bytes of this rank's gradients, flags of use left out; 0 where it is not known beforehand."""

    @abstractmethod
    def fill(self, slot: int, scale: torch.Tensor) -> None:
        """Take over the gradient of the parameter in ``slot``, times ``scale`` (of no axes)."""

    @abstractmethod
    def complete(self, scale: torch.Tensor) -> None:
        """Fill what is missing: gradients of earlier backward passes, else zeros."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the sum in ``parameter.grad``, or None where no rank had a gradient."""


class DenseBucket(Bucket):
    """One flat tensor: the gradients of parameters of one dtype, then one flag a gradient.

    ``parameter.grad`` becomes a view of it, in the parameter's own memory format. Large gradients
    are copied one by one, as they come out of the cache; small ones all at once, in a quarter of
    the calls.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.flat = torch.zeros(
            sum(sizes) + len(sizes), dtype=first.dtype, device=first.device, requires_grad=False
        )
        *parts, self._flags = self.flat.split([*sizes, len(sizes)])
        self._views = [_shaped_like(part, p) for part, p in zip(parts, parameters, strict=True)]
        self._filled: set[int] = set()
        self._unused: list[int] = []
        self.num_bytes = sum(sizes) * first.element_size()
        self._small = self.num_bytes < SMALL_GRADIENT * len(sizes)

    def fill(self, slot: int, scale: torch.Tensor) -> None:
        if not self._small:
            parameter, view = self.parameters[slot], self._views[slot]
            torch.mul(_dense(parameter), scale, out=view)
            parameter.grad = view
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
        pairs = zip(self.parameters, self._views, strict=True)
        used = [(parameter, view) for parameter, view in pairs if parameter.grad is not None]
        if not used:
            return
        torch._foreach_copy_([view for _, view in used], [_dense(p) for p, _ in used])
        self.flat.mul_(scale)
        for parameter, view in used:
            parameter.grad = view

    def start(self, transport: Transport, group: dist.ProcessGroup) -> Sequence[dist.Work]:
        """Begin the sum over ranks."""
        return transport(self.flat, group)

    def finish(self) -> None:
        if self._unused:
            used = self._flags.real.tolist() if self._flags.is_complex() else self._flags.tolist()
            for slot in self._unused:
                self.parameters[slot].grad = self._views[slot] if used[slot] else None


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

    def finish(self) -> None:
        self.parameter.grad, self._gradient = self._gradient, None

    def _no_rows(self) -> torch.Tensor:
        shape = self.parameter.shape
        return torch.sparse_coo_tensor(
            torch.empty(self._sparse_dim, 0, dtype=torch.int64, device=self.parameter.device),
            self.parameter.new_empty(0, *shape[self._sparse_dim :]).detach(),
            shape,
            check_invariants=False,
        )


def make_buckets(
    parameters: Sequence[nn.Parameter], sparse_dims: Sequence[int]
) -> list[tuple[Bucket, list[int]]]:
    """Buckets for the parameters of one segment, each with the positions it holds, by slot.

    One flat tensor a dtype, one bucket for each sparse gradient (``sparse_dims`` above 0).
    """
    dense: dict[torch.dtype, list[int]] = {}
    buckets: list[tuple[Bucket, list[int]]] = []
    for position, (parameter, sparse_dim) in enumerate(zip(parameters, sparse_dims, strict=True)):
        if sparse_dim:
            buckets.append((SparseBucket(parameter, sparse_dim), [position]))
        else:
            dense.setdefault(parameter.dtype, []).append(position)
    for positions in dense.values():
        buckets.append((DenseBucket([parameters[i] for i in positions]), positions))
    return buckets


def _shaped_like(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A view of ``part`` with the parameter's shape and, where these leave no holes, strides."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory without holes or overlaps, in some order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
