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
from dataclasses import KW_ONLY, dataclass
from math import prod

import torch
from torch import Tensor

from slipstream.codecs.compressor import Compressor, SlotState, any_infinite, exchange_dense, mixed
from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllReduce, ExchangeSteps


@dataclass(frozen=True, slots=True)
class PowerSgdCodec:
    """Matrices as products of two thin ones.

    Example:
        >>> codec = PowerSgdCodec(rank=1)
        >>> codec.matrix((512, 512, 3, 3)), codec.matrix((512,))
        ((512, 4608), None)
        >>> codec.wire_values((512, 512, 3, 3)), codec.wire_values((512,))
        (5120, 512)
    """

    rank: int = 4
    min_compression_rate: float = 2.0

    def matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The size n x m of the matrix as which a gradient travels; None: it travels dense.

        A gradient shrinks enough where ``(n + m) r * min_compression_rate < n m``.
        """
        if len(shape) < 2:
            return None
        n, m = shape[0], prod(shape[1:])
        pays = (n + m) * self.rank * self.min_compression_rate < n * m
        return (n, m) if pays else None

    def wire_values(self, shape: Sequence[int]) -> int:
        """Values that travel for a gradient."""
        size = self.matrix(shape)
        return prod(shape) if size is None else sum(size) * min(self.rank, *size)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns whose span contains that of the columns of ``matrix``.

    Householder's QR: stable, and defined for a matrix of zeros, where Gram-Schmidt divides by 0.
    """
    columns: Tensor = torch.linalg.qr(matrix).Q
    return columns


def direction(m: int, rank: int, seed: int) -> Tensor:
    """A first Q: m x rank normal numbers, the same on every rank for the same seed."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(m, rank, generator=random)


@dataclass(eq=False, repr=False)
class PowerSgdCompressor(Compressor):
    """The exchange of a bucket: P and all that stays dense in one request, then Q.

    Args, besides those of `Compressor`:
        start_step: updates before which gradients travel as they are.
        feedback: whether errors are fed back.
    """

    codec: PowerSgdCodec
    _: KW_ONLY
    start_step: int
    feedback: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = map(self.codec.matrix, self.shapes)
        self._matrices = {i: size for i, size in enumerate(sizes) if size is not None}
        self._dense = [slot for i, slot in enumerate(self.slots) if i not in self._matrices]
        thin = [(n, m, min(self.codec.rank, n, m)) for n, m in self._matrices.values()]
        firsts = [n * r for n, _, r in thin] + [slot.stop - slot.start for slot in self._dense]
        seconds = [m * r for _, m, r in thin]
        self._first = self.zeros(sum(firsts) + self.num_flags)
        self._second = self.zeros(sum(seconds))
        *parts, self._wire_flags = self._first.split([*firsts, self.num_flags])
        self._p = [part.view(n, r) for part, (n, _, r) in zip(parts, thin, strict=False)]
        self._dense_parts = parts[len(thin) :]
        pairs = zip(self._second.split(seconds), thin, strict=True)
        self._q = [part.view(m, r) for part, (_, m, r) in pairs]
        self._warm: list[Tensor | None] = [None] * len(thin)
        if self.feedback:
            self.residuals = [Residual(self.zeros(n, m)) for n, m, _ in thin]
        self._forgotten: set[int] = set()
        self._low_rank = False

    def exchange(self, values: Tensor, flags: Tensor, step: int) -> ExchangeSteps:
        self._low_rank = step >= self.start_step
        if not self._low_rank:
            yield from exchange_dense(values, flags)
            return
        results = [values[self.slots[i]].view(shape) for i, shape in self._matrices.items()]
        matrices = results
        if self.residuals:  # computed where the new error will be
            pairs = zip(results, self.residuals, strict=True)
            matrices = [torch.add(matrix, r.error, out=r.left()) for matrix, r in pairs]
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
            if self.residuals:
                matrix.addmm_(base, q.T, alpha=-1)
        yield AllReduce(self._second)
        flags[-1:] |= any_infinite(self._second * self.codec.rank)
        for result, base, q in zip(results, bases, self._q, strict=True):
            torch.mm(base, q.T, out=result)

    def _direction(self, number: int, step: int) -> Tensor:
        """The Q to start from: the last one, else random, the same on all ranks."""
        warm = self._warm[number]
        if warm is not None:
            return warm
        m, width = self._q[number].shape
        return direction(m, width, mixed(self.seed, step, number)).to(self._second)

    def commit(self) -> None:
        super().commit()
        if self._low_rank:
            for number in set(range(len(self._q))) - self._forgotten:
                self._warm[number] = self._q[number].clone()
        self._forgotten.clear()

    def rollback(self) -> None:
        super().rollback()
        self._forgotten.clear()

    def forget(self, slots: Sequence[int]) -> None:
        self._forgotten |= {number for number, i in enumerate(self._matrices) if i in slots}
        if self.residuals:
            for number in self._forgotten:
                self.residuals[number].forget()

    def sample(self) -> list[Tensor]:
        """Some values, with those of each Q, which must be that of all ranks."""
        warm = [q.view(-1)[: self.codec.rank].clone() for q in self._warm if q is not None]
        return [*super().sample(), *warm]

    def state(self) -> list[dict[str, Tensor]]:
        """``error`` and ``q`` of each matrix; q is the same on all ranks."""
        states: list[dict[str, Tensor]] = [{} for _ in self.slots]
        for i, residual in zip(self._matrices, self.residuals, strict=False):
            states[i]["error"] = residual.error.flatten().clone()
        for i, warm in zip(self._matrices, self._warm, strict=True):
            if warm is not None:
                states[i]["q"] = warm.clone()
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        own = [states[i] for i in self._matrices]
        for residual, state in zip(self.residuals, own, strict=False):
            if "error" in state:
                residual.error.copy_(state["error"].view(residual.error.shape))
            else:
                residual.error.zero_()
        self._warm = [
            state["q"].to(self._second) if "q" in state and state["q"].shape == q.shape else None
            for state, q in zip(own, self._q, strict=True)
        ]
