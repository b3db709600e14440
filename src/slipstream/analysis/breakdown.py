"""Says where the time of an iteration went, and what is typical over iterations and ranks.

Never reads a file and never draws a table: iterations in, numbers out. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

from slipstream.errors import TraceError
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, Event, exchange_order
from slipstream.trace.intervals import Intervals, length, subtract, touching, union
from slipstream.trace.timeline import Iteration


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time of one iteration went.

    ``data_wait + forward + backward + exposed + optimizer + other == iteration``. Time that several
    spans cover counts once: for forward, else backward, else an exchange, else the optimizer, else
    the wait for data. So ``exposed`` is the time in which an exchange ran and compute did not.
    ``other`` is idle time, in which nothing of what is recorded ran. ``tail``, from the end of
    backward to the end of the last exchange, lies across these parts.
    """

    data_wait: float
    forward: float
    backward: float
    exposed: float
    optimizer: float
    other: float
    iteration: float
    tail: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of one iteration of one rank; ``hidden + exposed == event.duration``.

    ``hidden`` is what ran beside forward or backward of this rank; ``start`` counts from the start
    of the iteration.
    """

    event: Event
    start: float
    hidden: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The numbers of one iteration of one rank."""

    iteration: Iteration
    parts: Parts
    exchanges: tuple[Exchange, ...]


def breakdown(iteration: Iteration) -> Breakdown:
    """Where the time of this iteration went.

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
    covers = {
        "forward": iteration.during(FORWARD),
        "backward": iteration.during(BACKWARD),
        "exposed": union((event.start, event.end) for event in exchanges),
        "optimizer": iteration.during(OPTIMIZER),
        "data_wait": iteration.during(DATA_WAIT),
    }
    left = union([(iteration.start, iteration.end)])
    seconds = {}
    for part, covered in covers.items():
        rest = subtract(left, covered)
        seconds[part] = length(left) - length(rest)
        left = rest
    parts = Parts(
        **seconds,
        other=length(left),
        iteration=iteration.duration,
        tail=_tail(covers["backward"], exchanges),
    )
    return Breakdown(
        iteration, parts, tuple(_exchange(e, iteration.start, compute) for e in exchanges)
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over ranks."""

    median: float
    low: float
    high: float
    slowest: int


@dataclass(frozen=True, slots=True)
class TypicalExchange:
    """Medians of one exchange over iterations and ranks.

    ``skew`` is the time between the first and the last rank's gradients being ready (or, where that
    is not known, the exchange being started): until then an all-reduce can only wait.
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


@dataclass(frozen=True, slots=True)
class Typical:
    """What is typical of many iterations: medians by rank, and of each exchange."""

    iterations: int
    ranks: Mapping[int, Parts]
    exchanges: tuple[TypicalExchange, ...]

    def spread(self, part: str) -> Spread:
        """One part (a field of ``Parts``) over the ranks."""
        by_rank = {rank: float(getattr(parts, part)) for rank, parts in self.ranks.items()}
        slowest = max(by_rank, key=lambda rank: by_rank[rank])
        values = by_rank.values()
        return Spread(median(values), min(values), max(values), slowest)


def typical(iterations: Iterable[Iteration], rank: int | None = None) -> Typical:
    """Medians over the iterations of each rank; of ``rank`` alone if it is given.

    Raises:
        TraceError: The rank has no iteration.

    Example:
        >>> from slipstream.trace.timeline import timeline
        >>> spans = [Event("iteration", rank, 2, 0.0, 1.0 + rank) for rank in range(2)]
        >>> typical(timeline(spans)).spread("iteration")
        Spread(median=1.5, low=1.0, high=2.0, slowest=1)
    """
    every = [breakdown(iteration) for iteration in iterations]
    by_rank: dict[int, list[Breakdown]] = defaultdict(list)
    for one in every:
        by_rank[one.iteration.rank].append(one)
    chosen = by_rank if rank is None else {rank: by_rank.get(rank, [])}
    if not all(chosen.values()):
        raise TraceError(f"rank {rank} is not in the trace. Ranks in it: {_listed(by_rank)}.")
    return Typical(
        iterations=max(map(len, chosen.values())),
        ranks={r: _median_parts(own) for r, own in sorted(chosen.items())},
        exchanges=_typical_exchanges([one for own in chosen.values() for one in own], every),
    )


def _tail(backward: Intervals, exchanges: Sequence[Event]) -> float:
    if not backward:
        return 0.0
    end = backward[-1][1]
    return max([event.end for event in exchanges] + [end]) - end


def _exchange(event: Event, zero: float, compute: Intervals) -> Exchange:
    beside = touching(compute, event.start, event.end)
    exposed = length(subtract(union([(event.start, event.end)]), beside))
    return Exchange(event, event.start - zero, event.duration - exposed, exposed)


def _median_parts(breakdowns: Sequence[Breakdown]) -> Parts:
    def middle(part: str) -> float:
        return median(float(getattr(one.parts, part)) for one in breakdowns)

    return Parts(**{field.name: middle(field.name) for field in fields(Parts)})


def _typical_exchanges(
    breakdowns: Sequence[Breakdown], every: Sequence[Breakdown]
) -> tuple[TypicalExchange, ...]:
    """What ``breakdowns`` say of each exchange, in order; its skew is that of ``every`` rank."""
    found: dict[str, dict[int, list[Exchange]]] = defaultdict(lambda: defaultdict(list))
    for one in breakdowns:
        for exchange in one.exchanges:
            found[exchange.event.name][one.iteration.rank].append(exchange)
    ready: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in every:
        for event in (exchange.event for exchange in one.exchanges):
            ready[event.name][event.step].append(event.args.get("ready", event.start))
    return tuple(
        _typical_exchange(
            name,
            list(found[name].values()),
            median(max(times) - min(times) for times in ready[name].values()),
        )
        for name in sorted(found, key=lambda name: exchange_order(name) or 0)
    )


def _typical_exchange(name: str, found: list[list[Exchange]], skew: float) -> TypicalExchange:
    """Medians over iterations by rank, then over ranks."""

    def middle(value: Callable[[Exchange], float]) -> float:
        return median(median(map(value, own)) for own in found)

    args = found[0][0].event.args
    return TypicalExchange(
        name=name,
        bytes=args.get("bytes", 0),
        gradients=args.get("gradients", 0),
        collectives=args.get("collectives", 0),
        start=middle(lambda e: e.start),
        duration=middle(lambda e: e.event.duration),
        hidden=middle(lambda e: e.hidden),
        exposed=middle(lambda e: e.exposed),
        skew=skew,
    )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
