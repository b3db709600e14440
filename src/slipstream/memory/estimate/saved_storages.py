"""Which storages a forward saves for backward, and the peak of their bytes in backward.

Pure: storages are numbers here, not tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.errors import StrategyError
from slipstream.strategy import OffloadConfig
from slipstream.strategy.memory import KeptOperation
from slipstream.strategy.validate import did_you_mean


@dataclass(frozen=True)
class SavedStorages:
    """The storages that a forward saves for backward, as numbers.

    Attributes:
        sizes: bytes of each storage, by its number.
        blocks: by path of a block, what it saves.
        inputs: by path of a block, the storages of its input tensors.
        results: by path of a block, the storages of results that ``keep`` can name.
        elsewhere: what is saved outside of blocks.
    """

    sizes: list[int] = field(default_factory=list)
    blocks: dict[str, set[int]] = field(default_factory=dict)
    inputs: dict[str, set[int]] = field(default_factory=dict)
    results: dict[str, dict[KeptOperation, set[int]]] = field(default_factory=dict)
    elsewhere: set[int] = field(default_factory=set)

    def num_bytes(self, path: str | None) -> int:
        """Bytes that a block saves; None: that are saved outside of blocks."""
        return self._bytes_of(self.elsewhere if path is None else self.blocks[path])

    @property
    def largest(self) -> int:
        """Bytes of the largest saved storage."""
        saved = self.elsewhere.union(*self.blocks.values())
        return max((self.sizes[storage] for storage in saved), default=0)

    def peak(
        self,
        regions: Sequence[Sequence[str]] = (),
        offload: OffloadConfig | None = None,
        keep: Sequence[KeptOperation] = (),
    ) -> int:
        """Peak bytes of saved tensors: while backward recomputes a region, all its saved tensors,
        and what is kept for the regions before it and not offloaded.

        Never below the true peak of saved tensors: what is saved outside of blocks counts all the
        time, although what is saved behind the blocks is freed first.

        Args:
            regions: paths of the blocks of each recomputed region; other blocks keep everything.
            offload: None: nothing is offloaded.
            keep: operations in regions whose results are kept; these are not offloaded.

        Raises:
            StrategyError: a region names a path that is not a block.
        """
        in_region = {path for region in regions for path in region}
        for path in in_region - self.blocks.keys():
            raise StrategyError(
                f"regions: {path!r} is not one of the counted blocks"
                f"{did_you_mean(path, self.blocks)}; allowed: {', '.join(self.blocks)}"
            )
        order = list(self.blocks)
        parts = [*regions, *([path] for path in order if path not in in_region)]
        parts.sort(key=lambda part: order.index(part[0]))
        kept, results = list[set[int]](), list[set[int]]()
        for part in parts:
            recomputed = part[0] in in_region
            kept.append((self.inputs if recomputed else self.blocks)[part[0]])
            results.append(self._results(part, keep) if recomputed else set())
        peak = self._bytes_of(self.elsewhere)
        for number, part in enumerate(parts):
            first = 0 if offload is None else _first_resident(number, len(parts), offload)
            inside = [self.blocks[path] for path in part]
            resident = self.elsewhere.union(
                *inside, *kept[first : number + 1], *results[: number + 1]
            )
            peak = max(peak, self._bytes_of(resident))
        return peak

    def _bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.sizes[storage] for storage in storages)

    def _results(self, paths: Iterable[str], keep: Sequence[KeptOperation]) -> set[int]:
        """Results of the operations in ``keep`` in these blocks."""
        found = (self.results[path].get(operation, ()) for path in paths for operation in keep)
        return set[int]().union(*found)


def _first_resident(number: int, count: int, offload: OffloadConfig) -> int:
    """The first of ``count`` parts that is in memory when backward is at part ``number``.

    Parts are in memory because they are fetched ahead, or because ``keep_last`` keeps them. At
    least one part ahead counts: in forward the part before may still be on its way out.
    """
    return max(min(number - max(offload.prefetch, 1), count - offload.keep_last), 0)
