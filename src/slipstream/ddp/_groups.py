"""The groups in which gradients travel, and what DDP's buckets bring in one backward pass.

[Note: Groups of our own]
DDP lays its buckets out by its settings and, after the first backward, by the order in which
gradients came. If codecs worked on those, a resumed run would begin with other blocks, pieces and
random numbers than the run that it continues. So gradients travel in groups that depend on the
parameters and ``bucket_cap_mb`` alone; a group is exchanged once all its gradients are there. They
are cut as DDP cuts buckets where gradients come in reverse order of registration: then no group
waits for a second bucket.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch

from slipstream.codecs.compressor import slot_slices
from slipstream.ddp._checks import other_parameters
from slipstream.errors import ModelError
from slipstream.gradients.compressed import NamedCompressor

FIRST_BYTES = 2**20
"""Of the first group: DDP's default for its first bucket."""


@dataclass(eq=False, slots=True)
class Arrived:
    """A bucket that DDP waits for, and how many of its gradients are not averaged yet."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    missing: int

    def taken_back(self) -> None:
        """One more of its gradients is averaged; only the channel's thread calls this."""
        self.missing -= 1
        if self.missing == 0:
            self.future.set_result(self.buffer)


@dataclass(eq=False, slots=True)
class BucketGroup:
    """Gradients that travel together, and in this backward where each of them came from."""

    names: Sequence[str]
    values: torch.Tensor
    codec: NamedCompressor | None
    num_flags: int
    is_finite: bool = True
    missing: int = 0
    sources: list[tuple[Arrived, torch.Tensor]] = field(default_factory=list)

    def reset(self) -> None:
        """Nothing has come yet; keeps no bucket alive."""
        self.missing, self.sources = len(self.names), []

    def has(self, slot: int) -> bool:
        """Whether the gradient of a slot has come in this backward."""
        return not self.missing or (bool(self.sources) and self.sources[slot] is not _NOTHING)

    def not_come(self) -> list[int]:
        """Slots whose gradient has not come."""
        return [slot for slot in range(len(self.names)) if not self.has(slot)]

    def put(self, slot: int, arrived: Arrived, row: torch.Tensor) -> None:
        if not self.sources:
            self.sources = [_NOTHING] * len(self.names)
        self.sources[slot] = arrived, row
        self.missing -= 1


_NOTHING = Arrived(torch.empty(0), torch.futures.Future(), 0), torch.empty(0)


class Backward:
    """The state of one backward pass under way; two threads use it.

    Attributes:
        started: groups whose exchange has begun.
        open: until all groups are exchanged.
        error: of the exchange that failed.
    """

    def __init__(self, *, open: bool = True) -> None:
        self.started = 0
        self.open = open
        self.error: Exception | None = None
        self._arrived: list[Arrived] = []
        self._lock = Lock()

    def add(self, arrived: Arrived) -> None:
        with self._lock:
            self._arrived.append(arrived)
            if self.error is not None:
                arrived.future.set_exception(self.error)  # type: ignore[arg-type]

    def finish(self) -> None:
        """All is exchanged: keep no bucket alive."""
        with self._lock:
            self.open = False
            self._arrived.clear()

    def fail(self, error: Exception) -> None:
        """Nothing more will be exchanged: let DDP wait for no bucket."""
        with self._lock:
            self.error = self.error or error
            for arrived in self._arrived:
                if not arrived.future.done():
                    arrived.future.set_exception(error)  # type: ignore[arg-type]


def grouped(kinds: Mapping[torch.Tensor, Hashable], most: int) -> list[list[torch.Tensor]]:
    """Parameters of one kind in groups of at least ``most`` bytes, in order; the last may be less.

    Example:
        >>> kinds = dict.fromkeys([torch.zeros(2), torch.zeros(3), torch.zeros(5)])
        >>> [[len(tensor) for tensor in group] for group in grouped(kinds, 20)]
        [[2, 3], [5]]
    """
    groups: list[list[torch.Tensor]] = []
    filling: dict[Hashable, list[torch.Tensor]] = {}
    limits: dict[Hashable, int] = {}
    for parameter, kind in kinds.items():
        if kind not in filling:
            filling[kind] = []
            groups.append(filling[kind])
        filling[kind].append(parameter)
        num_bytes = sum(p.nbytes for p in filling[kind])
        if num_bytes >= limits.setdefault(kind, min(FIRST_BYTES, most)):
            limits[kind] = most
            del filling[kind]
    return groups


class Routes:
    """The groups of DDP's buckets, found and checked once for each bucket that DDP makes.

    Args:
        places: group and slot of every parameter, which this keeps alive.
    """

    def __init__(self, places: Mapping[torch.Tensor, tuple[BucketGroup, int]]) -> None:
        self._places = places
        self._found: dict[tuple[int, ...], list[tuple[slice, BucketGroup, int]]] = {}

    def of(
        self, parameters: Sequence[torch.Tensor], row: torch.Tensor
    ) -> list[tuple[slice, BucketGroup, int]]:
        """The parts of a bucket's ``row`` of real numbers, and the group and slot of each.

        Raises:
            ModelError: a parameter without a group, or parts that do not cover the bucket.
        """
        key = tuple(map(id, parameters))
        found = self._found.get(key)
        if found is not None and found[-1][0].stop == row.numel():
            return found
        unknown = [tuple(p.shape) for p in parameters if p not in self._places]
        if unknown:
            raise other_parameters(f"also some of shapes {unknown}")
        slices = slot_slices(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        places = [self._places[p] for p in parameters]
        if slices[-1].stop != row.numel():
            names = ", ".join(group.names[slot] for group, slot in places)
            raise ModelError(
                f"DDP laid out a bucket of {row.numel()} values for {len(parameters)} parameters "
                f"with {slices[-1].stop} ({names}): DdpCodec does not know this layout; use "
                "accelerate(), or DDP without the hook"
            )
        found = [(where, *place) for where, place in zip(slices, places, strict=True)]
        self._found[key] = found
        return found


def real_row(values: torch.Tensor) -> torch.Tensor:
    """The values as a row of real numbers, without a copy."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
