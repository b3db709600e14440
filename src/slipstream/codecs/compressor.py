"""What every codec is to a bucket of gradients: an exchange, and the state between exchanges.

Never communicates (``exchange`` says why) and never knows parameters: gradients are slots here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.transport.requests import AllReduce, Exchange

_CACHED = 2**16
"""Values that fit into the cache of a core, with room for what is computed of them."""

SlotState = Mapping[str, torch.Tensor]
"""What is kept of one gradient, by name; empty where nothing is."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many exchange with each other, and which of them this one is."""

    rank: int
    count: int


class Compressor(ABC):
    """One rank's side of the exchange of one bucket, whose slots are gradients of known sizes.

    Attributes:
        num_values: elements of the flat tensor, padding included.
        works_in: dtype of the flat tensor.

    After an exchange comes ``commit`` or ``rollback``, before the first maybe ``forget``. Without
    a rider nobody hears that an exchange must not count.
    """

    num_values: int
    works_in: torch.dtype

    @abstractmethod
    def exchange(self, values: torch.Tensor, flags: torch.Tensor, step: int) -> Exchange:
        """Leave in ``values`` the sum over ranks of what each sent for its own.

        Args:
            values: 1-D, ``num_values`` elements: this rank's gradients, slot by slot, zeros behind.
            riders: 1-D, uint8, flags of 0 or 1: each becomes 1 where any rank has one. The last
                is the coder's: it becomes 1 where the values of a rank, or what came of them, are
                not finite. Then ``values`` are void and the step must not count.
            step: updates so far; the same on all ranks.
        """

    @abstractmethod
    def commit(self) -> None:
        """The step of the last exchange counts."""

    @abstractmethod
    def rollback(self) -> None:
        """The step of the last exchange does not count: the state is as before it."""

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """No rank had a gradient in these slots: what is kept of them is as before the exchange."""

    @abstractmethod
    def state(self) -> list[dict[str, torch.Tensor]]:
        """What is kept between exchanges, by slot; copies."""

    @abstractmethod
    def load(self, states: Sequence[SlotState]) -> None:
        """Go on from ``state()``, of which slots may have moved between buckets."""


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype gradients of a dtype are coded: fp32, and fp64 where they are."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    return not any_infinite(values)


def any_infinite(values: torch.Tensor) -> torch.Tensor:
    """Whether a value is infinite or NaN: of no axes, so that nobody waits for a device.

    On a CPU the smallest and the largest value are found ten times as fast as an infinity norm, or
    as asking each value, and for 16 bits together in half the time of one by one (torch 2.13).
    """
    flat = memory_order(values)
    some = [flat[part] for part in parts(flat.numel(), flat.device)]
    extremes = [extreme for part in some for extreme in torch.aminmax(part)]
    if not extremes:
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return torch.stack(extremes).isfinite().all().logical_not()


def exchange_dense(values: torch.Tensor, flags: torch.Tensor) -> Exchange:
    """What a codec that has not begun yet does: the plain sum, flags and all, in one collective.

    The last flag is raised where the sum is not finite.
    """
    plain = torch.cat([values, flags.to(values.dtype)])
    yield AllReduce(plain)
    values.copy_(plain[: values.numel()])
    flags.copy_(plain[values.numel() :] > 0)
    flags[-1:] |= any_infinite(plain)


def parts(numel: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Values that are worked on at a time, so that each operation finds them in the cache.

    All at once where there is no such cache; each part but the last a multiple of ``multiple``.

    Example:
        >>> list(parts(2**16 + 1, torch.device("cpu")))
        [slice(0, 65536, None), slice(65536, 65537, None)]
    """
    size = max(_CACHED // multiple, 1) * multiple if device.type == "cpu" else max(numel, 1)
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def mixed(*numbers: int) -> int:
    """One seed of several numbers.

    Example:
        >>> mixed(0, 1) == mixed(1, 0)
        False
    """
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return seed


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a parameter in the order in which its gradient lies in a bucket: 1-D, real.

    That of its memory, e.g. channels last; a view, where there are no holes.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).reshape(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory without holes or overlaps, in some order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
