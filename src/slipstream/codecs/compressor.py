"""Compressors: the exchange of one bucket of gradients, and the state between exchanges.

Never communicates, and never sees parameters: gradients are numbered slots of a flat tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from math import isfinite, prod
from typing import Any

import torch

from slipstream.codecs.residual import Residual
from slipstream.transport.requests import AllReduce, ExchangeSteps

_CACHED = 2**16
"""Values that fit into the cache of a core, with room for temporaries."""
_WIDENED = 2**20
"""16-bit values that are widened at once: fewer cost more calls, more do not fit into a cache."""

_SAMPLED = 1024
"""Values of a residual in a sample."""

SlotState = Mapping[str, torch.Tensor]
"""What a codec keeps of one gradient, by name; empty where nothing is."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of ranks that exchange with each other, and this one's place."""

    rank: int
    count: int


@dataclass(eq=False, repr=False)
class Compressor(ABC):
    """One rank's side of the exchange of one bucket, whose slots are gradients of known sizes.

    After an exchange comes an optional ``forget``, then ``commit`` or ``rollback``.

    Args:
        codec: encodes values.
        shapes: of the gradients, slot by slot.
        dtype: of the gradients.
        ranks: that take part.
        device: of the gradients.
        num_flags: flags that travel along.
        seed: of random streams; the same on all ranks.

    Attributes:
        slots: where the gradients lie in the flat tensor.
        num_values: elements of the flat tensor, padding included.
        works_in: dtype of the flat tensor.
        residuals: what the codec keeps until the step counts.
    """

    codec: Any
    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype
    ranks: Ranks
    device: torch.device
    _: KW_ONLY
    num_flags: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.works_in = real_dtype(self.dtype)
        self.slots = slot_slices(map(prod, self.shapes))
        self.num_values = sum(map(prod, self.shapes))
        self.residuals: list[Residual] = []
        self._spread: dict[int, torch.Tensor] = {}  # places of a sample, by size

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros for values or state."""
        return torch.zeros(shape, dtype=self.works_in, device=self.device)

    @abstractmethod
    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> ExchangeSteps:
        """Leave the sum over ranks of the compressed gradients in ``values``.

        Args:
            values: 1-D, ``num_values`` elements: this rank's gradients, slot by slot, then zeros.
            flags: 1-D, uint8, each 0 or 1: becomes 1 where any rank has a 1. The last one belongs
                to the compressor: it becomes 1 where the values of a rank, or their sums, are not
                finite. Then ``values`` are undefined and the step must not count. Without flags,
                peers cannot learn of non-finite values.
            step: updates so far; the same on all ranks.
        """

    def commit(self) -> None:
        """The step of the last exchange counts: keep its new state."""
        for residual in self.residuals:
            residual.commit()

    def rollback(self) -> None:
        """The step of the last exchange does not count: return to the state before it."""
        for residual in self.residuals:
            residual.rollback()

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """No rank had a gradient in these slots: their state stays as before the exchange."""

    def sample(self) -> list[torch.Tensor]:
        """Copies of some values of what is kept between exchanges: where all of it, or that of one
        gradient, is lost, some of them change."""
        return [r.error.view(-1)[self._spots(r.error.numel())] for r in self.residuals]

    def _spots(self, size: int) -> torch.Tensor:
        """Places of `sample` in a tensor of ``size`` values: in each slot, if it holds all."""
        if size not in self._spread:
            slots = self.slots if size >= self.slots[-1].stop else [slice(0, size)]
            most = max(_SAMPLED // len(slots), 16)
            found = [
                torch.arange(s.start, s.stop, max((s.stop - s.start) // most, 1))
                for s in slots
                if s.stop > s.start
            ]
            self._spread[size] = torch.cat([*found, torch.empty(0, dtype=torch.int64)])
            self._spread[size] = self._spread[size].to(self.device)
        return self._spread[size]

    @property
    def state_bytes(self) -> int:
        """Bytes of what is kept between exchanges on this rank."""
        return sum(tensor.nbytes for state in self.state() for tensor in state.values())

    @abstractmethod
    def state(self) -> list[dict[str, torch.Tensor]]:
        """Copies of what the codec keeps between exchanges, by slot."""

    @abstractmethod
    def load(self, states: Sequence[SlotState]) -> None:
        """Go on from ``state()``; slots may have moved between buckets since."""


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are compressed: fp64 for fp64 and complex128, else fp32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    return not any_infinite(values)


def any_infinite(values: torch.Tensor) -> torch.Tensor:
    """Whether a value is infinite or NaN: a 0-dimensional tensor, so that no device is waited for.

    On a CPU a sum takes a quarter of the time of ``aminmax`` (torch 2.13), and an infinite value or
    a NaN always shows in it; only where the sum is not finite are the values looked at themselves.
    """
    flat = memory_order(values)
    if flat.device.type == "cpu" and _sum_is_finite(flat):
        return torch.zeros((), dtype=torch.bool)
    chunks = [flat[part] for part in parts(flat.numel(), flat.device)]
    extremes = [extreme for chunk in chunks for extreme in torch.aminmax(chunk)]
    if not extremes:
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return torch.stack(extremes).isfinite().all().logical_not()


def _sum_is_finite(flat: torch.Tensor) -> bool:
    """Whether the sum of a real tensor of a CPU is finite; if so, all its values are.

    In 16 bits, sums of parts: each is widened first, and is to stay in the cache.
    """
    narrow = flat.dtype in (torch.float16, torch.bfloat16)
    chunks = flat.split(_WIDENED) if narrow else (flat,)
    dtype = torch.float32 if narrow else None
    return all(isfinite(chunk.sum(dtype=dtype).item()) for chunk in chunks)


def exchange_dense(values: torch.Tensor, flags: torch.Tensor) -> ExchangeSteps:
    """The plain sum of values and flags, in one request, for codecs that have not begun yet.

    Raises the last flag where the sum is not finite.
    """
    plain = torch.cat([values, flags.to(values.dtype)])
    yield AllReduce(plain)
    values.copy_(plain[: values.numel()])
    flags.copy_(plain[values.numel() :] > 0)
    flags[-1:] |= any_infinite(plain)


def parts(numel: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Slices to work on one at a time, so that each operation finds its values in the cache.

    One slice on devices other than a CPU; each but the last a multiple of ``multiple``.

    Example:
        >>> list(parts(2**16 + 1, torch.device("cpu")))
        [slice(0, 65536, None), slice(65536, 65537, None)]
    """
    size = max(_CACHED // multiple, 1) * multiple if device.type == "cpu" else max(numel, 1)
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def slot_slices(sizes: Iterable[int]) -> list[slice]:
    """Slices of slots of so many elements in a flat tensor.

    Example:
        >>> slot_slices([2, 3])
        [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def mixed(*numbers: int) -> int:
    """One seed from several numbers.

    Example:
        >>> mixed(0, 1) == mixed(1, 0)
        False
    """
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return seed


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a parameter in the order of its gradient in a bucket: 1-D, real.

    The order of memory, e.g. channels last; a view where there are no holes.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).reshape(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory without holes or overlaps, in some order of the axes."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
