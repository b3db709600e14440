"""What to compute again so that activations fit a budget in the least time; a pure function.

The model is a chain of blocks. Of a block either everything is kept that its backward needs, or it
belongs to a region, of which only the input is kept: before the region's backward it runs once
more, now with a plan of its own for the same memory, which may hold regions again. Source: Beaumont
et al., "Optimal checkpointing for heterogeneous chains" (rotor), whose recurrence this is, with the
memory that a region needs while it runs ahead of the model (see ``chain``) added.
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

_MOST_CELLS = 2**24
"""Of the table of a chain, about: blocks squared times slots; more take seconds to fill."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a block takes.

    Attributes:
        forward: seconds.
        backward: seconds.
        output: bytes of what it returns.
        saved: bytes that are kept for its backward, its output included, its input not.
    """

    forward: float
    backward: float
    output: int
    saved: int


@dataclass(frozen=True, slots=True)
class Region:
    """Blocks of which only the input is kept; ``parts`` says how they run the second time."""

    parts: tuple[int | Region, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The numbers of the blocks, in order.

        Example:
            >>> Region((0, Region((1, 2)), 3)).blocks
            (0, 1, 2, 3)
        """
        inner = (part.blocks if isinstance(part, Region) else (part,) for part in self.parts)
        return tuple(number for numbers in inner for number in numbers)


Parts = tuple[int | Region, ...]
"""A chain: blocks that are kept, by their number, and regions."""


def seconds(parts: Parts, costs: Sequence[Cost]) -> float:
    """Seconds of forward and backward of a chain.

    Example:
        >>> costs = [Cost(1.0, 2.0, output=1, saved=5)] * 3
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


def peak_bytes(parts: Parts, costs: Sequence[Cost]) -> int:
    """The most bytes that a chain holds at a time; its input counts with what comes before it.

    Example:
        >>> costs = [Cost(1.0, 2.0, output=1, saved=5)] * 3
        >>> peak_bytes((0, 1, 2), costs), peak_bytes((Region((0, 1)), 2), costs)
        (15, 10)
    """
    held = most = 0
    for part in parts:
        if isinstance(part, Region):
            outputs = [costs[number].output for number in part.blocks]
            most = max(most, held + sum(outputs), held + peak_bytes(part.parts, costs))
            held += outputs[-1]
        else:
            held += costs[part].saved
            most = max(most, held)
    return most


def segments(count: int, length: int, borders: Collection[int] = ()) -> Parts:
    """Regions of ``length`` blocks one after another, none of which crosses a border.

    Args:
        count: blocks of the chain.
        length: 1: every block by itself; about the square root of ``count``: Chen et al. 2016.
        borders: blocks at which a region must begin anew.

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


def square_root(count: int, borders: Collection[int] = ()) -> Parts:
    """Regions of about the square root of the number of blocks (Chen et al. 2016)."""
    return segments(count, max(1, isqrt(count)), borders)


def least_bytes(costs: Sequence[Cost], borders: Collection[int] = ()) -> int:
    """The fewest bytes with which a chain can be trained at all.

    Example:
        >>> least_bytes([Cost(1.0, 2.0, output=1, saved=5)] * 3)
        6
    """
    return _Chain(costs, borders).least(0, len(costs) - 1)


def cheapest(
    costs: Sequence[Cost], limit: int, borders: Collection[int] = (), *, slots: int = 500
) -> Parts:
    """The plan that holds at most ``limit`` bytes at any time, and takes the least time.

    Optimal, as long as the bytes of all blocks have a common measure of which the limit is no more
    than some thousands; else for bytes rounded up to ``limit / slots``, and never slower than
    groups of equal length, with the last blocks kept, that fit.

    Args:
        costs: of the blocks, in order.
        limit: bytes.
        borders: blocks at which a region must begin anew.
        slots: into how many parts the limit is divided where bytes must be rounded.

    Raises:
        StrategyError: the limit is too low; says what is needed.

    Example:
        >>> costs = [Cost(1.0, 2.0, output=1, saved=5)] * 3
        >>> cheapest(costs, 15), cheapest(costs, 11)
        ((0, 1, 2), (0, Region(parts=(1,)), 2))
        >>> cheapest(costs, 5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        slipstream.errors.StrategyError: a budget of 5 bytes ...; allowed: at least 6 ...
    """
    chain, last = _Chain(costs, borders), len(costs) - 1
    least = chain.least(0, last)
    total = sum(cost.saved for cost in costs)
    if limit < least:
        raise StrategyError(
            f"a budget of {limit} bytes for activations of {len(costs)} blocks; allowed: at least "
            f"{least} ({least / total:.3f} of the {total} bytes where everything is kept)"
        )
    if total <= limit:
        return tuple(range(len(costs)))
    measure = gcd(*(size for cost in costs for size in (cost.output, cost.saved)))
    exact = measure > 0 and limit // measure <= _MOST_CELLS // len(costs) ** 2
    slot = measure if exact else max(1.0, limit / slots)
    table = _Table(chain, slot, int(limit // slot))
    fits = table.fits(0, last)
    plans = [table.parts(0, last, table.size) if fits else chain.smallest(0, last)]
    if not exact:  # rounding may leave out plans that fit, above all where the limit is low
        plans += [plan for plan in _groups(len(costs), borders) if peak_bytes(plan, costs) <= limit]
    return min(plans, key=lambda plan: seconds(plan, costs))


def _groups(count: int, borders: Collection[int]) -> Iterator[Parts]:
    """Regions of equal length, and the last blocks kept."""
    for kept in range(count):
        end = count - kept
        for length in range(1, min(end, 2 * isqrt(count)) + 1):
            yield (*segments(end, length, borders), *range(end, count))


class _Chain:
    """Exact bytes: the plan of the fewest, and what the recurrence needs of a chain."""

    def __init__(self, costs: Sequence[Cost], borders: Collection[int]) -> None:
        self.costs = costs
        self._outputs = list(accumulate((cost.output for cost in costs), initial=0))
        self._forward = list(accumulate((cost.forward for cost in costs), initial=0.0))
        self._run = list(accumulate(number in borders for number in range(len(costs))))
        self.least = cache(self._least)

    def outputs(self, first: int, end: int) -> int:
        """Bytes of the outputs of blocks ``first`` to ``end - 1``."""
        return self._outputs[end] - self._outputs[first]

    def forward(self, first: int, end: int) -> float:
        """Seconds of a forward through them."""
        return self._forward[end] - self._forward[first]

    def ends(self, first: int, last: int) -> list[int]:
        """Where a region from ``first`` on may end, so that a block is left for after it."""
        return [end for end in range(first + 1, last + 1) if self._run[end - 1] == self._run[first]]

    def _least(self, first: int, last: int) -> int:
        return self._smallest(first, last)[0] if first <= last else 0

    def _smallest(self, first: int, last: int) -> tuple[int, int]:
        """The fewest bytes of a chain, and where its first region ends (``first``: it has none)."""
        options = [(self.costs[first].saved + self.least(first + 1, last), first)]
        for end in self.ends(first, last):
            after = self.costs[end - 1].output + self.least(end, last)
            options.append((max(self.outputs(first, end), after, self.least(first, end - 1)), end))
        return min(options)

    def smallest(self, first: int, last: int) -> Parts:
        """The plan of the fewest bytes."""
        if first > last:
            return ()
        _, end = self._smallest(first, last)
        if end == first:
            return (first, *self.smallest(first + 1, last))
        return (Region(self.smallest(first, end - 1)), *self.smallest(end, last))


class _Table:
    """Least seconds of every part of a chain with 0, 1, ... ``size`` slots of memory."""

    def __init__(self, chain: _Chain, slot: float, size: int) -> None:
        self._chain, self._slot, self.size = chain, slot, size
        count = len(chain.costs)
        nothing = np.zeros(size + 1)
        self._least = {(end, end - 1): nothing for end in range(count + 1)}
        for length in range(count):
            for first in range(count - length):
                last = first + length
                options = [seconds for _, seconds in self._options(first, last)]
                self._least[first, last] = np.minimum.reduce(options)

    def fits(self, first: int, last: int) -> bool:
        """Whether there is a plan for all slots."""
        return bool(self._least[first, last][self.size] < inf)

    def parts(self, first: int, last: int, slots: int) -> Parts:
        """The plan of the least seconds."""
        if first > last:
            return ()
        end, _ = min(self._options(first, last), key=lambda option: float(option[1][slots]))
        if end == first:
            left = slots - self._slots(self._chain.costs[first].saved)
            return (first, *self.parts(first + 1, last, left))
        left = slots - self._slots(self._chain.costs[end - 1].output)
        region = Region(self.parts(first, end - 1, slots))
        return (region, *self.parts(end, last, left))

    def _options(self, first: int, last: int) -> list[tuple[int, Any]]:
        """Seconds by slots where the first block is kept (``first``), and for each end of a region
        that begins with it."""
        cost = self._chain.costs[first]
        after = self._least[first + 1, last] + (cost.forward + cost.backward)
        options = [(first, self._with_less(after, cost.saved))]
        for end in self._chain.ends(first, last):
            after = self._with_less(self._least[end, last], self._chain.costs[end - 1].output)
            ahead = self._slots(self._chain.outputs(first, end))
            total = after + self._least[first, end - 1] + self._chain.forward(first, end)
            total[:ahead] = inf
            options.append((end, total))
        return options

    def _with_less(self, least: Any, num_bytes: int) -> Any:
        """As ``least`` where ``num_bytes`` of the memory are taken."""
        taken = min(self._slots(num_bytes), self.size + 1)
        return np.concatenate([np.full(taken, inf), least[: self.size + 1 - taken]])

    def _slots(self, num_bytes: int) -> int:
        """Rounded up."""
        return int(-(-num_bytes // self._slot))
