"""Low rank: a gradient of n x m travels as P of n x r and Q of m x r (PowerSGD).

    P = M Q,    P = orthonormal(sum of P over ranks),    Q = M^T P,    M' = P (sum of Q)^T

One step of a power iteration on the sum of all ranks' matrices, which is never formed. Warm-started
with the last Q, it follows the leading r directions from step to step. As P and Q are summed, the
bytes do not grow with the number of ranks: ``(n + m) r`` values instead of ``n m``. Error feedback
on each rank: ``e = M - M'``. Vogels et al., "PowerSGD" (2019); settings as in torch's hook.

Vectors, and matrices that would hardly shrink, travel dense in one request with P. Until
``start_step`` everything does: early gradients change too fast for a warm start.

Exactness: lossy; at full rank it is the plain sum up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from slipstream.codecs.compressor import (
    Compressor,
    Ranks,
    SlotState,
    any_infinite,
    exchange_dense,
    mixed,
    real_dtype,
    slot_slices,
)
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllReduce, Exchange


@dataclass(frozen=True, slots=True)
class PowerSgdCodec:
    """Matrices as products of two thin ones.

    Example:
        >>> codec = PowerSgdCodec(rank=1)
        >>> outer = torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 6))
        >>> p, q = codec.encode(outer)
        >>> torch.allclose(codec.decode(p, q), outer)
        True
        >>> codec.pays((512, 512, 3, 3)), codec.pays((512,))
        (True, False)
    """

    rank: int = 4
    min_compression_rate: float = 2.0

    def matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The size of the matrix that a gradient is viewed as; None with fewer than two axes."""
        if len(shape) < 2 or 0 in shape:
            return None
        return shape[0], prod(shape[1:])

    def pays(self, shape: Sequence[int]) -> bool:
        """Whether a gradient shrinks enough: ``(n + m) r * min_compression_rate < n m``."""
        size = self.matrix(shape)
        if size is None:
            return False
        n, m = size
        return (n + m) * self.rank * self.min_compression_rate < n * m

    def wire_values(self, shape: Sequence[int]) -> int:
        """Values that travel for a gradient."""
        size = self.matrix(shape)
        if size is None or not self.pays(shape):
            return prod(shape)
        return sum(size) * min(self.rank, *size)

    def encode(
        self, values: torch.Tensor, q: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """P and Q of one matrix on one rank."""
        if q is None:
            q = direction(values.shape[1], min(self.rank, *values.shape), 0).to(values)
        p = orthonormal(values @ orthonormal(q))
        return p, values.T @ p

    def decode(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """The matrix of rank r that P and Q stand for."""
        return p @ q.T


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns whose span contains that of the columns of ``matrix``.

    Householder's QR: stable, and defined for a matrix of zeros, where Gram-Schmidt divides by 0.
    """
    columns: torch.Tensor = torch.linalg.qr(matrix).Q
    return columns


def direction(m: int, rank: int, seed: int) -> torch.Tensor:
    """A first Q: m x rank normal numbers, the same on every rank for the same seed."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(m, rank, generator=random)


class PowerSgdCompressor(Compressor):
    """The exchange of a bucket: P and all that stays dense in one request, then Q.

    Args:
        codec: rank and when it pays.
        shapes: of the gradients, slot by slot.
        dtype: of the gradients.
        ranks: that take part.
        device: of the gradients.
        start_step: updates before which gradients travel as they are.
        warm_start: whether Q is kept from step to step.
        feedback: whether errors are fed back.
        num_flags: flags that travel along.
        seed: of the first Q; the same on all ranks.
    """

    def __init__(
        self,
        codec: PowerSgdCodec,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        ranks: Ranks,
        device: torch.device,
        *,
        start_step: int,
        warm_start: bool,
        feedback: bool,
        num_flags: int = 0,
        seed: int = 0,
    ) -> None:
        self.works_in = real_dtype(dtype)
        self._codec, self._start_step, self._warm_start = codec, start_step, warm_start
        self._seed = seed
        self._slots = slot_slices(map(prod, shapes))
        self.num_values = self._slots[-1].stop if self._slots else 0
        matrices = [codec.matrix(shape) if codec.pays(shape) else None for shape in shapes]
        self._matrices = {i: shape for i, shape in enumerate(matrices) if shape is not None}
        self._dense = [slot for i, slot in enumerate(self._slots) if i not in self._matrices]
        sizes = [shape[0] * self._width(shape) for shape in self._matrices.values()]
        sizes += [slot.stop - slot.start for slot in self._dense]
        self._first = torch.zeros(sum(sizes) + num_flags, dtype=self.works_in, device=device)
        *parts, self._wire_flags = self._first.split([*sizes, num_flags])
        shapes_p = [(n, self._width((n, m))) for n, m in self._matrices.values()]
        self._p = [part.view(s) for part, s in zip(parts, shapes_p, strict=False)]
        self._dense_parts = parts[len(self._p) :]
        shapes_q = [(m, self._width((n, m))) for n, m in self._matrices.values()]
        self._second = torch.zeros(sum(map(prod, shapes_q)), dtype=self.works_in, device=device)
        parts = self._second.split([prod(s) for s in shapes_q])
        self._q = [part.view(s) for part, s in zip(parts, shapes_q, strict=True)]
        self._warm: list[torch.Tensor | None] = [None] * len(self._q)
        self._residuals = [
            Residual(torch.zeros(n, m, dtype=self.works_in, device=device))
            for n, m in self._matrices.values()
            if feedback
        ]
        self._forgotten: set[int] = set()
        self._low_rank = False

    def _width(self, shape: tuple[int, int]) -> int:
        return min(self._codec.rank, *shape)

    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> Exchange:
        self._low_rank = step >= self._start_step
        if not self._low_rank:
            yield from exchange_dense(values, flags)
            return
        results = [values[self._slots[i]].view(shape) for i, shape in self._matrices.items()]
        matrices = results
        if self._residuals:  # computed where the new error will be
            pairs = zip(results, self._residuals, strict=True)
            matrices = [
                torch.add(matrix, residual.error, out=residual.left()) for matrix, residual in pairs
            ]
        for number, (matrix, p) in enumerate(zip(matrices, self._p, strict=True)):
            torch.mm(matrix, orthonormal(self._direction(number, step)), out=p)
        for part, slot in zip(self._dense_parts, self._dense, strict=True):
            part.copy_(values[slot])
        self._wire_flags.copy_(flags)
        yield AllReduce(self._first)
        flags.copy_(self._wire_flags > 0)
        # A matrix that is not finite makes P not finite, as 0 times infinity is NaN.
        nonfinite = any_infinite(self._first)
        flags[-1:] |= nonfinite
        self._first.masked_fill_(nonfinite, 0)  # QR needs finite values
        for part, slot in zip(self._dense_parts, self._dense, strict=True):
            values[slot] = part
        if not matrices:
            return
        bases = [orthonormal(p) for p in self._p]
        for matrix, base, q in zip(matrices, bases, self._q, strict=True):
            q.copy_((base.T.contiguous() @ matrix).T)  # M^T P would read M column by column
            if self._residuals:
                matrix.addmm_(base, q.T, alpha=-1)
        yield AllReduce(self._second)
        flags[-1:] |= any_infinite(self._second * self._codec.rank)
        for result, base, q in zip(results, bases, self._q, strict=True):
            torch.mm(base, q.T, out=result)

    def _direction(self, number: int, step: int) -> torch.Tensor:
        """The Q to start from: the last one, else random, the same on all ranks."""
        warm = self._warm[number]
        if warm is not None:
            return warm
        m, width = self._q[number].shape
        return direction(m, width, mixed(self._seed, step, number)).to(self._second)

    def commit(self) -> None:
        for residual in self._residuals:
            residual.commit()
        if self._low_rank and self._warm_start:
            for number in set(range(len(self._q))) - self._forgotten:
                self._warm[number] = self._q[number].clone()
        self._forgotten.clear()

    def rollback(self) -> None:
        for residual in self._residuals:
            residual.rollback()
        self._forgotten.clear()

    def forget(self, slots: Sequence[int]) -> None:
        for number, i in enumerate(self._matrices):
            if i in slots:
                self._forgotten.add(number)
                if self._residuals:
                    self._residuals[number].forget()

    def state(self) -> list[dict[str, torch.Tensor]]:
        """``error`` and ``q`` of each matrix; q is the same on all ranks."""
        states: list[dict[str, torch.Tensor]] = [{} for _ in self._slots]
        for i, residual in zip(self._matrices, self._residuals, strict=False):
            states[i]["error"] = residual.error.flatten().clone()
        for i, warm in zip(self._matrices, self._warm, strict=True):
            if warm is not None:
                states[i]["q"] = warm.clone()
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        self._warm = [None] * len(self._q)
        for residual in self._residuals:
            residual.error.zero_()
        for number, i in enumerate(self._matrices):
            state = states[i]
            if "error" in state and self._residuals:
                error = self._residuals[number].error
                error.copy_(state["error"].view(error.shape))
            if "q" in state and state["q"].shape == self._q[number].shape:
                self._warm[number] = state["q"].to(self._second)
