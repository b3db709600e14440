"""Splits the time of an iteration into parts, and takes medians over iterations and ranks.

Iterations in, numbers out. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import inf
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

from slipstream.errors import TraceError
from slipstream.trace.event import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    MEETING_WAIT,
    OPTIMIZER,
    Event,
    exchange_order,
)
from slipstream.trace.intervals import Intervals, length, subtract, union
from slipstream.trace.timeline import Iteration


@dataclass(frozen=True, slots=True)
class IterationParts:
    """The parts of one iteration.

    ``data_wait + forward + backward + exposed + optimizer + other == iteration``. Time covered by
    several spans counts once: as forward, else backward, else exchange, else optimizer, else wait
    for data. So ``exposed`` is the time in which an exchange ran without compute beside it, or in
    which a rank waited for one of a meeting.
    ``other`` is time in which nothing that is recorded ran. ``tail``, from the end of backward to
    the end of the last exchange, overlaps these parts.
    """

    data_wait: float
    forward: float
    backward: float
    exposed: float
    optimizer: float
    other: float
    iteration: float
    tail: float


class TracedExchange(NamedTuple):
    """One exchange of one iteration of one rank; ``hidden + exposed == duration``.

    ``hidden`` is the time beside forward or backward of this rank; ``start`` counts from the start
    of the iteration.
    """

    event: Event
    start: float
    duration: float
    hidden: float
    exposed: float


class Breakdown(NamedTuple):
    """The parts and exchanges of one iteration of one rank."""

    iteration: Iteration
    parts: IterationParts
    exchanges: tuple[TracedExchange, ...]


def breakdown(iteration: Iteration) -> Breakdown:
    """The parts and exchanges of this iteration.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> [iteration] = timeline([
        ...     Event("iteration", 0, 2, 0.0, 10.0),
        ...     Event("forward", 0, 2, 0.0, 3.0),
        ...     Event("backward", 0, 2, 3.0, 8.0),
        ...     Event("allreduce1", 0, 2, 6.0, 9.0),
        ... ])
        >>> parts = breakdown(iteration).parts
        >>> parts.forward, parts.backward, parts.exposed, parts.other, parts.tail
        (3.0, 5.0, 1.0, 1.0, 1.0)
    """
    exchanges, compute = iteration.exchanges, iteration.compute
    covers = {  # in the order in which time covered by several counts
        "forward": iteration.during(FORWARD),
        "backward": iteration.during(BACKWARD),
        "exposed": union(
            [*((event.start, event.end) for event in exchanges), *iteration.during(MEETING_WAIT)]
        ),
        "optimizer": iteration.during(OPTIMIZER),
        "data_wait": iteration.during(DATA_WAIT),
    }
    remaining = union([(iteration.start, iteration.end)])
    seconds = {}
    for part, covered in covers.items():
        rest = subtract(remaining, covered)
        seconds[part] = length(remaining) - length(rest)
        remaining = rest
    # Without a backward there is no tail.
    ended = covers["backward"][-1][1] if covers["backward"] else inf
    tail = max((event.end - ended for event in exchanges), default=0.0)
    other, whole = length(remaining), iteration.duration
    parts = IterationParts(**seconds, other=other, iteration=whole, tail=max(tail, 0.0))
    beside = tuple(_exchange(event, iteration.start, compute) for event in exchanges)
    return Breakdown(iteration, parts, beside)


class Spread(NamedTuple):
    """One part over ranks: mean, extremes, and the slowest rank."""

    mean: float
    low: float
    high: float
    slowest: int


class TypicalExchange(NamedTuple):
    """Medians of one exchange over iterations and ranks.

    ``skew`` is the time between the first and the last rank having the segment's gradients ready
    (or starting the exchange, if ready times are unknown): until then an all-reduce can only wait.
    ``module`` is the one whose parameters or gradients travel under FSDP2; else empty.
    """

    name: str
    bytes: int
    gradients: int
    collectives: int
    start: float
    duration: float
    hidden: float
    exposed: float
    skew: float
    module: str = ""


class TypicalIteration(NamedTuple):
    """The parts by rank, and each exchange.

    The parts of a rank are means over the middle half of its iterations, by how long they took: so
    a few slow ones do not count, and the parts add up to the iteration. Exchanges are medians.
    """

    iterations: int
    ranks: Mapping[int, IterationParts]
    exchanges: tuple[TypicalExchange, ...]

    def spread(self, part: str) -> Spread:
        """One part (a field of ``IterationParts``) over the ranks."""
        by_rank = {rank: float(getattr(parts, part)) for rank, parts in self.ranks.items()}
        slowest = max(by_rank, key=lambda rank: by_rank[rank])
        values = by_rank.values()
        return Spread(fmean(values), min(values), max(values), slowest)


def typical_iteration(iterations: Iterable[Iteration], rank: int | None = None) -> TypicalIteration:
    """Take medians over the iterations of each rank, or of ``rank`` alone.

    Raises:
        TraceError: The rank has no iteration.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", rank, 2, 0.0, 1.0 + rank) for rank in range(2)]
        >>> typical_iteration(timeline(spans)).spread("iteration")
        Spread(mean=1.5, low=1.0, high=2.0, slowest=1)
    """
    breakdowns = [breakdown(iteration) for iteration in iterations]
    by_rank: dict[int, list[Breakdown]] = defaultdict(list)
    for one in breakdowns:
        by_rank[one.iteration.rank].append(one)
    if rank is not None and rank not in by_rank:
        ranks = ", ".join(map(str, sorted(by_rank)))
        raise TraceError(f"rank {rank} is not in the trace. Ranks in it: {ranks}.")
    chosen = by_rank if rank is None else {rank: by_rank[rank]}
    parts = {r: _middle_parts(of_rank) for r, of_rank in sorted(chosen.items())}
    exchanges = _typical_exchanges(list(chain(*chosen.values())), breakdowns)
    return TypicalIteration(max(map(len, chosen.values())), parts, exchanges)


def _exchange(event: Event, zero: float, compute: Intervals) -> TracedExchange:
    exposed = length(subtract(union([(event.start, event.end)]), compute))
    return TracedExchange(
        event, event.start - zero, event.duration, event.duration - exposed, exposed
    )


def _middle_parts(breakdowns: Sequence[Breakdown]) -> IterationParts:
    """Means over the middle half of the iterations."""
    in_order = sorted((one.parts for one in breakdowns), key=attrgetter("iteration"))
    left_out = (len(in_order) + 1) // 4
    middle = in_order[left_out : len(in_order) - left_out]
    names = (field.name for field in fields(IterationParts))
    return IterationParts(**{n: fmean(getattr(one, n) for one in middle) for n in names})


def _typical_exchanges(
    breakdowns: Sequence[Breakdown], of_all_ranks: Sequence[Breakdown]
) -> tuple[TypicalExchange, ...]:
    """The exchanges of ``breakdowns``, in order; their skew is that of all ranks."""
    by_rank: dict[str, dict[int, list[TracedExchange]]] = defaultdict(lambda: defaultdict(list))
    for one in breakdowns:
        for exchange in one.exchanges:
            by_rank[exchange.event.name][one.iteration.rank].append(exchange)
    ready: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in of_all_ranks:
        for event in (exchange.event for exchange in one.exchanges):
            ready[event.name][event.step].append(event.args.get("ready", event.start))
    typical = []
    for name in sorted(by_rank, key=lambda name: exchange_order(name) or 0):
        ranks = list(by_rank[name].values())
        skew = median(max(times) - min(times) for times in ready[name].values())
        sizes = {n: ranks[0][0].event.args.get(n, 0) for n in ("bytes", "gradients", "collectives")}
        module = str(ranks[0][0].event.args.get("module", ""))
        times = {
            n: median(median(map(attrgetter(n), of_rank)) for of_rank in ranks)
            for n in ("start", "duration", "hidden", "exposed")
        }
        typical.append(TypicalExchange(name, **sizes, **times, skew=skew, module=module))
    return tuple(typical)
