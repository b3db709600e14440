"""The events of a simulated iteration, as the recorder would have written them.

Never computes a moment: ``_step`` does; this turns work into time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.planner.channel import IN_FLIGHT, Array, Clock, Landing
from slipstream.planner.exchange import CommTask
from slipstream.planner.step import Moments, Step
from slipstream.trace.event import BACKWARD, DATA_WAIT, FORWARD, ITERATION, OPTIMIZER, Event

DECODE = "decode"
"""The span in which a rank makes gradients of what a codec sent."""


def events(
    step: Step, moments: Moments, clock: Clock, number: int, ranks: Sequence[int]
) -> list[Event]:
    """Every span of iteration ``number`` on the ranks asked for."""
    found: list[Event] = []
    for rank in ranks:
        spans = _spans(step, moments, clock, rank)
        found += [Event(name, rank, number, start, end, args) for name, start, end, args in spans]
    return found


_Span = tuple[str, float, float, dict[str, Any]]


def _spans(step: Step, moments: Moments, clock: Clock, rank: int) -> Iterator[_Span]:
    """Name, start, end and facts."""

    def time(work: Array) -> float:
        return float(clock.times_of(work[rank]))

    samples = float(step.workload.samples[rank]) * step.plan.accumulate
    facts: dict[str, Any] = {"samples": _whole(samples)} if samples else {}
    yield ITERATION, time(moments.start), time(moments.end), facts
    for index, one in enumerate(moments.passes):
        if step.workload.data_wait[rank] > 0:
            yield DATA_WAIT, time(one.waits), time(one.forward), {}
        yield FORWARD, time(one.forward), time(one.backward), {}
        begins, facts = time(one.backward), {}
        if index == len(moments.passes) - 1:
            ready = clock.times_of(moments.ready[rank]) - begins
            facts = {"gradients_ready": ready.tolist()}
        yield BACKWARD, begins, time(one.ends), facts
    readies = [time(moments.start)] * len(step.gathers)
    yield from _exchanges(step.gathers, moments.gathered, readies, "all_gather")
    sharded = step.plan.transport == "sharded"
    readies = clock.times_of(moments.handed[rank]).tolist()
    kind = "reduce_scatter" if sharded else ""
    yield from _exchanges(step.parcels, moments.landings, readies, kind)
    for column, seconds in enumerate(step.decode_seconds):
        ends = moments.decoded[rank, column]
        start, end = clock.times_of(ends - seconds), clock.times_of(ends)
        yield DECODE, float(start), float(end), {}
    yield OPTIMIZER, time(moments.update), time(moments.end), {}


def _exchanges(
    parcels: Sequence[CommTask], landings: Sequence[Landing], readies: Sequence[float], kind: str
) -> Iterator[_Span]:
    """A span begins when its rank has handed it over and a place in flight is free."""
    free = [0.0] * IN_FLIGHT
    for parcel, landing, ready in zip(parcels, landings, readies, strict=True):
        place = free.index(min(free))
        start = min(max(ready, free[place]), landing.start)
        free[place] = landing.end
        facts: dict[str, Any] = {"bytes": parcel.num_bytes}
        if parcel.segment is not None:
            facts |= {
                "segment": parcel.segment,
                "gradients": parcel.gradients,
                "collectives": parcel.collectives,
                "ready": ready,
            }
            if kind:
                facts["collective"] = kind
        yield parcel.name, start, landing.end, facts


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number
