"""An average computed a second way: from two numbers of each rank's gradients.

A sketch is the sum of values with random signs, twice, with other signs. It is linear: the sketches
of all ranks' gradients, added up and scaled, are those of the average, but for rounding. So a few
numbers tell whether an average is one, and, where it is not, whose part is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from zlib import crc32

import torch

EXACT, NARROW = 1e-4, 0.05
"""Largest differences, in shares of the gradients' norm, of sums in 32 bits and of those in 16."""
SIGNS = 2
_BLOCK = 2**16
"""Values that have signs of their own; the signs of further blocks are these or their opposites."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs for each value of a tensor, in ``SIGNS`` rows, the same on all ranks.

    The sign of value ``i`` is ``inside[row, i % BLOCK] * of_block[row, i // BLOCK]``: few random
    numbers for many values.

    Attributes:
        inside: of a block, fp32 like the others.
        of_block: one for each block.
    """

    inside: torch.Tensor
    of_block: torch.Tensor

    @classmethod
    def random(cls, numel: int, seed: int, device: torch.device) -> Signs:
        """Draw the signs of a tensor of ``numel`` values."""
        generator = torch.Generator().manual_seed(seed)
        length, blocks = min(numel, _BLOCK), -(-numel // _BLOCK)
        size = SIGNS, length + blocks
        bits = torch.randint(0, 2, size, generator=generator, dtype=torch.int8)
        signs = (2.0 * bits - 1.0).to(device)
        return cls(signs[:, :length], signs[:, length:])

    def whole(self, numel: int) -> torch.Tensor:
        """One for each value, a row of ``numel`` for each of the ``SIGNS``."""
        pairs = self.of_block[:, :, None] * self.inside[:, None, :]
        return pairs.reshape(SIGNS, -1)[:, :numel]


def sketch(values: torch.Tensor, signs: Signs | torch.Tensor) -> torch.Tensor:
    """The sums of ``values`` with each row of ``signs``, in fp64.

    Example:
        >>> sketch(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [1.0, -1.0]])).tolist()
        [3.0, -1.0]
    """
    flat = values.detach().reshape(-1)
    flat = flat.real if flat.is_complex() else flat
    if isinstance(signs, torch.Tensor):
        return (signs.to(torch.float64) * flat).sum(1)
    if not flat.numel():
        return torch.zeros(SIGNS, dtype=torch.float64, device=flat.device)
    # Not by a product of fp32 matrices: the script, or autocast, may let those round to 16 bits.
    wide = torch.promote_types(flat.dtype, torch.float32 if flat.is_cpu else torch.float64)
    rows = signs.inside.to(wide)
    sums = [
        torch.stack([torch.dot(block, row[: len(block)]) for row in rows])
        for block in flat.to(wide).split(rows.shape[1])
    ]
    return (torch.stack(sums, 1).to(torch.float64) * signs.of_block).sum(1)


@dataclass(frozen=True, slots=True)
class Sketched:
    """A sampled average as one rank knows it.

    Attributes:
        own: the sketch of its gradients, scaled as the average is.
        norm: of these gradients, scaled.
        average: the sketch of what came back, or of its part of it.
        used: the sketch of what the optimizer gets.
    """

    own: tuple[float, ...]
    norm: float
    average: tuple[float, ...]
    used: tuple[float, ...]


def wrong_average(ranks: Mapping[int, Sketched], *, in_parts: bool, tolerance: float) -> str | None:
    """Say what is wrong with an average, and whose part is missing; None: nothing.

    Args:
        ranks: of all ranks that averaged, by their number.
        in_parts: whether each has a part of the average, and not all of it.
        tolerance: `EXACT` or `NARROW`.

    Example:
        >>> two = {0: Sketched((1.0, 2.0), 2.0, (1.0, 2.0), (1.0, 2.0)),
        ...        1: Sketched((4.0, -1.0), 4.0, (1.0, 2.0), (1.0, 2.0))}
        >>> wrong_average(two, in_parts=False, tolerance=EXACT)
        'the gradients of rank 1 are missing in the average'
    """
    sketches, numbers = ranks.values(), [*ranks]
    own = torch.tensor([rank.own for rank in sketches], dtype=torch.float64)
    allowed = tolerance * max(sum(rank.norm for rank in sketches), 1e-30)
    expected = own.sum(0)
    averages = torch.tensor([rank.average for rank in sketches], dtype=torch.float64)
    if in_parts:
        averages = averages.sum(0, keepdim=True)
    wrong = [r for r, average in enumerate(averages) if not _near(average, expected, allowed)]
    if not wrong:
        return None
    found = averages[wrong[0]]
    if 0 < len(wrong) < len(averages):
        words = ", ".join(str(numbers[r]) for r in wrong)
        kept = (
            "its own gradients" if _is_multiple(found, own[wrong[0]], allowed) else "other values"
        )
        return f"rank {words} did not get the average of all ranks, but has {kept}"
    for rank, part in zip(numbers, own, strict=True):
        if _near(found, expected - part, allowed):
            return f"the gradients of rank {rank} are missing in the average"
    for rank, part in zip(numbers, own, strict=True):
        if _near(found, part, allowed):
            return f"the average is the gradients of rank {rank} alone"
    if _near(found, expected / len(ranks), allowed):
        return "the average was divided by the number of ranks twice"
    if _near(found, expected * len(ranks), allowed):
        return "the average was not divided by the number of ranks"
    ratio = float(found @ expected / (expected @ expected))
    return f"the average is not that of the ranks' gradients (it is about {ratio:.3g} times that)"


def divided_again(ranks: Sequence[Sketched]) -> bool:
    """Whether the script has divided an average by the number of ranks, which it was already."""
    if len(ranks) < 2:
        return False
    for rank in ranks:
        average = torch.tensor(rank.average, dtype=torch.float64)
        used = torch.tensor(rank.used, dtype=torch.float64)
        if not _near(used * len(ranks), average, 1e-5 * float(average.norm())):
            return False
        if not float(average.norm()):
            return False
    return True


def _near(one: torch.Tensor, other: torch.Tensor, allowed: float) -> bool:
    return bool(((one - other).abs() <= allowed).all())


def _is_multiple(found: torch.Tensor, own: torch.Tensor, allowed: float) -> bool:
    length = float(own @ own)
    if not length:
        return False
    return _near(found, own * (float(found @ own) / length), allowed)


class AverageSample:
    """Sketches of some gradients that travel together, as one rank sees them before and after.

    Args:
        seed: chooses the signs; the same on all ranks.
        names: of the gradients.
        scale: makes their sum over ranks the average.
        narrow: whether they are rounded to 16 bits.
        in_parts: whether each rank gets a part of their average, and not all of it.
    """

    def __init__(
        self,
        seed: int,
        names: Sequence[str],
        scale: float,
        *,
        narrow: bool = False,
        in_parts: bool = False,
    ) -> None:
        self.seed, self.names, self._scale = seed, tuple(names), scale
        self.tolerance, self.in_parts = NARROW if narrow else EXACT, in_parts
        self._seen: set[str] = set()
        self._signs: dict[str, Signs] = {}
        self._sums = {kind: torch.zeros(SIGNS, dtype=torch.float64) for kind in _KINDS}
        self._square = 0.0

    def own(self, name: str, gradient: torch.Tensor) -> None:
        """Take this rank's gradient, once."""
        if name not in self._seen:
            self._seen.add(name)
            values = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            self._add("own", sketch(values, self.signs(name, values)) * self._scale)
            self._square += (_norm(values) * self._scale) ** 2

    def average(self, name: str, value: torch.Tensor, signs: torch.Tensor | None = None) -> None:
        """Take what came back: all of it, or a part, with the ``signs`` of that."""
        self._add("average", sketch(value, self.signs(name, value) if signs is None else signs))

    def used(self, name: str, value: torch.Tensor) -> None:
        """Take what the optimizer gets."""
        self._add("used", sketch(value, self.signs(name, value)))

    def signs(self, name: str, like: torch.Tensor) -> Signs:
        """The signs of a gradient."""
        if name not in self._signs:
            seed = self.seed + crc32(name.encode())
            self._signs[name] = Signs.random(like.numel(), seed, like.device)
        return self._signs[name]

    def result(self) -> Sketched:
        """Return the sketches of this rank."""
        own, average, used = (tuple(self._sums[kind].tolist()) for kind in _KINDS)
        return Sketched(own, self._square**0.5, average, used)

    def _add(self, kind: str, value: torch.Tensor) -> None:
        self._sums[kind] += value.cpu()


def _norm(values: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    if 1e-3 < norm < 1e3:
        return norm
    # The squares of smaller and larger values may not fit into fp32, nor a norm into 16 bits.
    wide = torch.promote_types(values.dtype, torch.float64)
    return float(torch.linalg.vector_norm(values.to(wide)))


_KINDS = ("own", "average", "used")


@dataclass(slots=True)
class AverageSamples:
    """A sample of every bucket of gradients: what befalls one exchange need not befall another.

    Attributes:
        seed: chooses gradients and signs; the same on all ranks.
        buckets: filled by the engine, whose buckets are the same on all ranks.
    """

    MOST: ClassVar[int] = 8
    """Gradients that are sketched, but one of each bucket at least: they cost as much as digests of
    four times their values."""

    seed: int
    buckets: list[AverageSample] = field(default_factory=list)
