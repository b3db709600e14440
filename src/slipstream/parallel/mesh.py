"""Which ranks share data, a chain of stages, and layers: a pure function of three sizes.

Tensor ranks are neighbours (they talk most, so they share a host), then come stages, then data.
Never makes a process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from slipstream.errors import StrategyError

AXES = ("data", "pipeline", "tensor")
"""From the slowest to the fastest."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0 .. ``world_size - 1`` as a box of data x pipeline x tensor.

    Example:
        >>> mesh = Mesh.of(8, pipeline=2, tensor=2)
        >>> mesh.data, mesh.coordinates(6)
        (2, {'data': 1, 'pipeline': 1, 'tensor': 0})
        >>> mesh.groups("tensor")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> mesh.groups("data")
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """

    data: int
    pipeline: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, *, pipeline: int = 1, tensor: int = 1) -> Mesh:
        """What is left of ``world_size`` ranks trains data-parallel.

        Raises:
            StrategyError: the ranks do not make up such a box.
        """
        share = pipeline * tensor
        if world_size % share:
            raise StrategyError(
                f"parallel: {pipeline} stages x {tensor} tensor ranks take {share} ranks, but "
                f"{world_size} were started; allowed: a multiple of {share}"
            )
        return cls(world_size // share, pipeline, tensor)

    @property
    def model_parallel(self) -> int:
        """Ranks that share one model."""
        return self.pipeline * self.tensor

    def models(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share one model, group by group."""
        starts = range(0, self.data * self.model_parallel, self.model_parallel)
        return tuple(tuple(range(start, start + self.model_parallel)) for start in starts)

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is along each axis."""
        rank, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rank, self.pipeline)
        return {"data": data, "pipeline": pipeline, "tensor": tensor}

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ along ``axis`` only, group by group; every rank is in one."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, self.sizes.values()))):
            others = tuple(p for name, p in zip(AXES, place, strict=True) if name != axis)
            rows.setdefault(others, []).append(rank)
        return tuple(tuple(ranks) for ranks in rows.values())
