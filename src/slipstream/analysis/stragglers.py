"""Finds ranks that are persistently slower than the others, and the phase in which they are.

Iterations in, numbers out. All times are seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER
from slipstream.trace.intervals import length
from slipstream.trace.timeline import Iteration

PHASES = (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER)
SLOWER = 0.05
"""A straggler takes longer than the median of the others by this share of that median ..."""
OF_ITERATION = 0.01
"""... and by this share of an iteration: very short phases do not matter."""


class Straggler(NamedTuple):
    """A rank that is persistently slower than the others in one phase.

    ``seconds`` is the typical excess over ``usual``, the median of the other ranks;
    ``iterations`` of ``of`` show it.
    """

    rank: int
    phase: str
    seconds: float
    usual: float
    iterations: int
    of: int


def stragglers(iterations: Sequence[Iteration], clock_error: float = 0.0) -> tuple[Straggler, ...]:
    """The stragglers, the worst first.

    Compares the time of a rank in a phase with the median of the other ranks, in each iteration.
    The rank is a straggler if the lower median of its excess over iterations is more than
    ``clock_error``, 5 % of the others' time and 1 % of an iteration. A single odd iteration makes
    no straggler.

    Example:
        >>> from slipstream.trace.event import Event
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", rank, 2, 0.0, 1.0) for rank in range(3)]
        >>> spans += [Event("forward", rank, 2, 0.0, 0.2 + 0.1 * (rank == 2)) for rank in range(3)]
        >>> [(straggler.rank, straggler.phase) for straggler in stragglers(timeline(spans))]
        [(2, 'forward')]
    """
    bound = max(clock_error, OF_ITERATION * median(one.duration for one in iterations))
    slow = [s for phase in PHASES for s in _of_phase(iterations, phase, bound)]
    return tuple(sorted(slow, key=lambda s: -s.seconds))


def _of_phase(iterations: Sequence[Iteration], phase: str, bound: float) -> list[Straggler]:
    by_step: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for iteration in iterations:
        by_step[iteration.step].append((length(iteration.during(phase)), iteration.rank))
    excess: dict[int, list[tuple[float, float]]] = defaultdict(list)  # seconds, median of others
    for times in by_step.values():
        ordered = sorted(seconds for seconds, _ in times)
        for seconds, rank in times if len(times) > 1 else ():
            others = median_of_others(ordered, seconds)
            excess[rank].append((seconds - others, others))
    slow = []
    for rank, pairs in excess.items():
        typical, usual = median_low(over for over, _ in pairs), median(usual for _, usual in pairs)
        if typical > max(bound, SLOWER * usual):
            count = sum(over > max(bound, SLOWER * usual) for over, usual in pairs)
            slow.append(Straggler(rank, phase, typical, usual, count, len(pairs)))
    return slow


def median_of_others(ordered: Sequence[float], value: float) -> float:
    """The median of ascending values without one that equals ``value``.

    Takes O(log n): a phase of thousands of ranks needs it once for each rank.

    Example:
        >>> median_of_others([1.0, 2.0, 5.0], 5.0)
        1.5
    """
    at, half = bisect_left(ordered, value), (len(ordered) - 1) // 2

    def other(index: int) -> float:
        return ordered[index + (index >= at)]

    return other(half) if len(ordered) % 2 == 0 else (other(half - 1) + other(half)) / 2
