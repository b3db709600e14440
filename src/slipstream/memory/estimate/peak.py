"""What is in memory at the worst moment, of what a forward saves for backward.

Pure: knows storages by numbers, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import StrategyError
from slipstream.strategy import Offload
from slipstream.strategy.memory import Operation
from slipstream.strategy.validate import did_you_mean


@dataclass(frozen=True)
class Saved:
    """What a forward keeps for backward: which storages, each known by a number.

    Attributes:
        sizes: bytes of each.
        blocks: those that each block saves, by path.
        inputs: those of the tensors that each block is called with.
        results: those that operations in each block return, of operations that can be kept.
        elsewhere: those that are saved outside of blocks.
    """

    sizes: Mapping[int, int]
    blocks: Mapping[str, frozenset[int]]
    inputs: Mapping[str, frozenset[int]]
    results: Mapping[str, Mapping[Operation, frozenset[int]]]
    elsewhere: frozenset[int]

    def num_bytes(self, storages: Iterable[int]) -> int:
        """Of storages, each once."""
        return sum(self.sizes[storage] for storage in set(storages))

    def of(self, path: str | None) -> frozenset[int]:
        """What a block saves; None: what is saved outside of blocks."""
        return self.elsewhere if path is None else self.blocks[path]

    @property
    def total(self) -> int:
        """Bytes where everything is kept."""
        return self.num_bytes(self.elsewhere.union(*self.blocks.values()))

    @property
    def largest(self) -> int:
        """Bytes of the largest storage."""
        return max((self.sizes[s] for s in self.elsewhere.union(*self.blocks.values())), default=0)

    def kept(
        self, regions: Sequence[Sequence[str]], keep: Sequence[Operation] = ()
    ) -> frozenset[int]:
        """What is kept from forward to backward where ``regions`` of blocks are computed again but
        for the results of ``keep``.

        Raises:
            StrategyError: a region names what is no block.
        """
        self._check(regions)
        inside = {path for region in regions for path in region}
        plain = [saved for path, saved in self.blocks.items() if path not in inside]
        inputs = [self.inputs[region[0]] for region in regions]
        return self.elsewhere.union(*plain, *inputs, self._results(inside, keep))

    def peak(
        self,
        regions: Sequence[Sequence[str]] = (),
        config: Offload | None = None,
        keep: Sequence[Operation] = (),
    ) -> int:
        """The most bytes at a time that are saved: where backward computes a region again, with all
        that is kept for it and the regions before it; less what has left. Results of ``keep`` do
        not leave.

        Never too low for saved tensors: what is saved outside of blocks counts throughout, though
        that behind them is used up first.

        Raises:
            StrategyError: a region names what is no block.
        """
        self._check(regions)
        parts = [*regions, *([p] for p in self.blocks if all(p not in r for r in regions))]
        order = {path: number for number, path in enumerate(self.blocks)}
        parts.sort(key=lambda part: order[part[0]])
        own = [self.inputs[p[0]] if p in regions else self.blocks[p[0]] for p in parts]
        results = [self._results(p, keep) if p in regions else frozenset() for p in parts]
        most = self.num_bytes(self.elsewhere)
        for number, part in enumerate(parts):
            here = self.elsewhere.union(*(self.blocks[path] for path in part), own[number])
            here = here.union(*results[: number + 1])
            stays = range(number) if config is None else self._there(number, len(parts), config)
            most = max(most, self.num_bytes(here.union(*(own[i] for i in stays))))
        return most

    def _results(self, paths: Iterable[str], keep: Sequence[Operation]) -> frozenset[int]:
        """Of these operations in these blocks."""
        found = (self.results[path].get(operation) for path in paths for operation in keep)
        return frozenset().union(*(storages for storages in found if storages is not None))

    def _check(self, regions: Sequence[Sequence[str]]) -> None:
        for path in (path for region in regions for path in region):
            if path not in self.blocks:
                raise StrategyError(
                    f"regions: {path!r} is no block that was counted"
                    f"{did_you_mean(path, self.blocks)}; allowed: {', '.join(self.blocks)}"
                )

    def _there(self, number: int, count: int, config: Offload) -> list[int]:
        """Parts that are in memory when backward is at one: fetched ahead, or never gone; in
        forward it is the one before that may still be on its way out.
        """
        first = min(number - max(config.prefetch, 1), count - config.keep_last)
        return list(range(max(first, 0), number + 1))
