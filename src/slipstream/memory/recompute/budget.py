"""Choose which blocks to recompute so that activations fit a budget in the least time.

Pure functions. The model is a chain of blocks. A block either keeps everything its backward needs,
or belongs to a region, which keeps only its input: before its backward the region runs once more,
by an inner plan for the same memory, which may contain regions again. The dynamic program is that
of Beaumont et al., "Optimal checkpointing for heterogeneous chains" (rotor), plus the memory that a
region needs while it runs ahead of the model (see ``chain``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import gcd, inf, isqrt
from typing import Any

import numpy as np

from slipstream.errors import StrategyError

_MAX_CELLS = 2**24
"""Cells of the table of a chain (about blocks squared times slots); more take seconds to fill."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of a block.

    Attributes:
        forward: seconds.
        backward: seconds.
        output: bytes of its output.
        saved: bytes kept for its backward, with its output, without its input.
    """

    forward: float
    backward: float
    output: int
    saved: int


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive blocks that keep only their input; ``parts`` is the plan of recomputation."""

    parts: tuple[int | Region, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks, in order.

        Example:
            >>> Region((0, Region((1, 2)), 3)).blocks
            (0, 1, 2, 3)
        """
        parts = (part.blocks if isinstance(part, Region) else (part,) for part in self.parts)
        return tuple(number for numbers in parts for number in numbers)


RegionParts = tuple[int | Region, ...]
"""A plan of a chain: numbers of blocks that are kept, and regions, in order."""


def seconds(parts: RegionParts, costs: Sequence[BlockCost]) -> float:
    """Seconds of forward and backward of a chain with the plan ``parts``.

    Example:
        >>> costs = [BlockCost(1.0, 2.0, output=1, saved=5)] * 3
        >>> seconds((0, 1, 2), costs), seconds((Region((0, 1)), 2), costs)
        (9.0, 11.0)
    """
    total = 0.0
    for part in parts:
        if isinstance(part, Region):
            total += sum(costs[number].forward for number in part.blocks)
            total += seconds(part.parts, costs)
        else:
            total += costs[part].forward + costs[part].backward
    return total


def peak_bytes(parts: RegionParts, costs: Sequence[BlockCost]) -> int:
    """Peak bytes of a chain with the plan ``parts``, without the input of the chain.

    Example:
        >>> costs = [BlockCost(1.0, 2.0, output=1, saved=5)] * 3
        >>> peak_bytes((0, 1, 2), costs), peak_bytes((Region((0, 1)), 2), costs)
        (15, 10)
    """
    kept = peak = 0
    for part in parts:
        if isinstance(part, Region):
            outputs = [costs[number].output for number in part.blocks]
            peak = max(peak, kept + sum(outputs), kept + peak_bytes(part.parts, costs))
            kept += outputs[-1]
        else:
            kept += costs[part].saved
            peak = max(peak, kept)
    return peak


def segments(count: int, length: int, borders: Collection[int] = ()) -> RegionParts:
    """Consecutive regions of ``length`` blocks; the last one before a border may be shorter.

    Args:
        count: number of blocks of the chain.
        length: 1 recomputes every block by itself; Chen et al. 2016 take the square root of
            ``count``.
        borders: numbers of blocks that must be the first of their region.

    Example:
        >>> [region.blocks for region in segments(5, 2, borders=[1])]
        [(0,), (1, 2), (3, 4)]
    """
    regions: list[list[int]] = []
    for number in range(count):
        if not regions or number in borders or len(regions[-1]) == length:
            regions.append([])
        regions[-1].append(number)
    return tuple(Region(tuple(numbers)) for numbers in regions)


def cheapest(
    costs: Sequence[BlockCost], limit: int, borders: Collection[int] = (), *, slots: int = 500
) -> RegionParts:
    """The plan of the least time whose peak is at most ``limit`` bytes.

    Optimal if all sizes have a common divisor that divides ``limit`` into at most some thousand
    slots. Otherwise sizes are rounded up to multiples of ``limit / slots``; the plan is then never
    slower than regions of equal length, with the last blocks kept, that fit.

    Args:
        costs: of the blocks, in order.
        limit: bytes.
        borders: numbers of blocks that must be the first of their region.
        slots: number of parts of the limit where sizes must be rounded.

    Raises:
        StrategyError: the limit is too low; the message says what is needed.

    Example:
        >>> costs = [BlockCost(1.0, 2.0, output=1, saved=5)] * 3
        >>> cheapest(costs, 15), cheapest(costs, 11)
        ((0, 1, 2), (0, Region(parts=(1,)), 2))
        >>> cheapest(costs, 5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        slipstream.errors.StrategyError: a budget of 5 bytes ...; allowed: at least 6 ...
    """
    chain, last = _ChainCosts(costs, borders), len(costs) - 1
    least, _ = chain.least(0, last)
    total = sum(cost.saved for cost in costs)
    if limit < least:
        raise StrategyError(
            f"a budget of {limit} bytes for activations of {len(costs)} blocks; allowed: at least "
            f"{least} ({least / total:.3f} of the {total} bytes without recomputation)"
        )
    if total <= limit:
        return tuple(range(len(costs)))
    divisor = gcd(*(size for cost in costs for size in (cost.output, cost.saved)))
    exact = divisor > 0 and limit // divisor <= _MAX_CELLS // len(costs) ** 2
    slot = divisor if exact else max(1.0, limit / slots)
    table = _Table(chain, slot, int(limit // slot))
    plans = [table.plan(0, last, table.size) if table.fits(0, last) else chain.least_plan(0, last)]
    if not exact:  # rounding up rejects plans that fit, above all where the limit is low
        uniform = _uniform_plans(len(costs), borders)
        plans += [plan for plan in uniform if peak_bytes(plan, costs) <= limit]
    return min(plans, key=lambda plan: seconds(plan, costs))


def _uniform_plans(count: int, borders: Collection[int]) -> Iterator[RegionParts]:
    """Regions of equal length, with the last blocks kept."""
    for end in range(count, 0, -1):
        for length in range(1, min(end, 2 * isqrt(count)) + 1):
            yield (*segments(end, length, borders), *range(end, count))


class _ChainCosts:
    """Costs of spans of a chain, and the plan of the fewest bytes (exact, ignoring time)."""

    def __init__(self, costs: Sequence[BlockCost], borders: Collection[int]) -> None:
        self.costs = costs
        self._outputs = list(accumulate((cost.output for cost in costs), initial=0))
        self._forward = list(accumulate((cost.forward for cost in costs), initial=0.0))
        self._span = list(accumulate(number in borders for number in range(len(costs))))
        self.least = cache(self._least)

    def outputs(self, first: int, end: int) -> int:
        """Bytes of the outputs of blocks ``first`` to ``end - 1``."""
        return self._outputs[end] - self._outputs[first]

    def forward(self, first: int, end: int) -> float:
        """Seconds of a forward through blocks ``first`` to ``end - 1``."""
        return self._forward[end] - self._forward[first]

    def region_ends(self, first: int, last: int) -> list[int]:
        """Places where a region that begins at ``first`` may end (exclusive).

        It crosses no border and leaves out block ``last``: recomputing the end of a chain right
        after its forward saves nothing, as its inner plan could have run in the first place.
        """
        ends = range(first + 1, last + 1)
        return [end for end in ends if self._span[end - 1] == self._span[first]]

    def _least(self, first: int, last: int) -> tuple[int, int]:
        """The lowest peak of blocks ``first`` to ``last``, and the end of their first region
        (``first``: that block is kept)."""
        if first > last:
            return 0, first
        options = [(self.costs[first].saved + self.least(first + 1, last)[0], first)]
        for end in self.region_ends(first, last):
            after = self.costs[end - 1].output + self.least(end, last)[0]
            inner = self.least(first, end - 1)[0]
            options.append((max(self.outputs(first, end), inner, after), end))
        return min(options)

    def least_plan(self, first: int, last: int) -> RegionParts:
        """The plan of the lowest peak."""
        if first > last:
            return ()
        _, end = self.least(first, last)
        if end == first:
            return (first, *self.least_plan(first + 1, last))
        return (Region(self.least_plan(first, end - 1)), *self.least_plan(end, last))


class _Table:
    """Least seconds of every span of a chain with 0, 1, ... ``size`` slots of memory."""

    def __init__(self, chain: _ChainCosts, slot: float, size: int) -> None:
        self._chain, self._slot, self.size = chain, slot, size
        count = len(chain.costs)
        no_time = np.zeros(size + 1)
        self._least = {(end, end - 1): no_time for end in range(count + 1)}
        for length in range(count):
            for first in range(count - length):
                last = first + length
                options = [seconds for _, seconds in self._options(first, last)]
                self._least[first, last] = np.minimum.reduce(options)

    def fits(self, first: int, last: int) -> bool:
        """Whether any plan fits into all slots."""
        return bool(self._least[first, last][self.size] < inf)

    def plan(self, first: int, last: int, slots: int) -> RegionParts:
        """The plan of the least seconds in so many slots."""
        if first > last:
            return ()
        end, _ = min(self._options(first, last), key=lambda option: float(option[1][slots]))
        if end == first:
            left = slots - self._slots(self._chain.costs[first].saved)
            return (first, *self.plan(first + 1, last, left))
        left = slots - self._slots(self._chain.costs[end - 1].output)
        return (Region(self.plan(first, end - 1, slots)), *self.plan(end, last, left))

    def _options(self, first: int, last: int) -> list[tuple[int, Any]]:
        """Seconds by slots if the first block is kept (key: ``first``), and for each possible end
        of a region that begins with it (key: that end)."""
        cost = self._chain.costs[first]
        after = self._least[first + 1, last] + (cost.forward + cost.backward)
        options = [(first, self._shifted(after, cost.saved))]
        for end in self._chain.region_ends(first, last):
            after = self._shifted(self._least[end, last], self._chain.costs[end - 1].output)
            ahead = self._slots(self._chain.outputs(first, end))
            total = after + self._least[first, end - 1] + self._chain.forward(first, end)
            total[:ahead] = inf
            options.append((end, total))
        return options

    def _shifted(self, least: Any, num_bytes: int) -> Any:
        """``least`` by slots where ``num_bytes`` of the memory are occupied."""
        occupied = min(self._slots(num_bytes), self.size + 1)
        return np.concatenate([np.full(occupied, inf), least[: self.size + 1 - occupied]])

    def _slots(self, num_bytes: int) -> int:
        """Slots of so many bytes, rounded up."""
        return int(-(-num_bytes // self._slot))
