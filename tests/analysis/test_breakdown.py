"""Where the time goes: identities over random traces, and numbers known by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given

from slipstream.analysis.breakdown import Spread, breakdown, typical_iteration
from slipstream.analysis.tables import PARTS
from slipstream.errors import TraceError
from slipstream.trace.event import Event
from slipstream.trace.timeline import timeline
from tests.harness.traces import by_hand, many, random_traces


@many
@given(random_traces())  # whole numbers: sums are exact
def test_the_parts_of_an_iteration_sum_to_it(trace):
    for iteration in timeline(trace.events):
        parts = asdict(breakdown(iteration).parts)
        assert all(seconds >= 0 for seconds in parts.values())
        tail, whole = parts.pop("tail"), parts.pop("iteration")
        assert tail >= 0
        assert sum(parts.values()) == whole == iteration.end - iteration.start


@many
@given(random_traces())
def test_an_exchange_is_hidden_or_exposed(trace):
    for iteration in timeline(trace.events):
        compute = [e for e in iteration.events if e.name in ("forward", "backward")]
        for exchange in breakdown(iteration).exchanges:
            seconds = range(int(exchange.event.start), int(exchange.event.end))
            hidden = sum(any(c.start <= s < c.end for c in compute) for s in seconds)
            assert exchange.hidden == hidden
            assert exchange.hidden + exchange.exposed == exchange.event.duration


@many
@given(random_traces())
def test_typical_numbers_cover_every_rank_and_exchange(trace):
    iterations = timeline(trace.events)
    found = typical_iteration(iterations)
    assert list(found.ranks) == sorted({iteration.rank for iteration in iterations})
    assert {e.name for e in found.exchanges} == {
        e.name for iteration in iterations for e in iteration.exchanges
    }
    assert all(e.skew >= 0 for e in found.exchanges)


def test_numbers_known_by_hand():
    found = typical_iteration(timeline(by_hand().events))
    assert found.iterations == 3
    rank0 = {name: round(1e3 * seconds, 6) for name, seconds in asdict(found.ranks[0]).items()}
    assert rank0 == {
        "data_wait": 5,
        "forward": 25,
        "backward": 40,
        "exposed": 15,
        "optimizer": 10,
        "other": 5,
        "iteration": 100,
        "tail": 15,
    }
    first, second = found.exchanges
    assert (first.name, first.bytes, first.gradients, first.collectives) == (
        ("allreduce1", 5_000_000, 7, 1)
    )
    for exchange, expected in ((first, (40, 20, 20, 0, 2)), (second, (60, 25, 10, 15, 2))):
        times = (
            exchange.start,
            exchange.duration,
            exchange.hidden,
            exchange.exposed,
            exchange.skew,
        )
        assert [t * 1e3 for t in times] == pytest.approx(expected, abs=1e-6)


def test_the_spread_over_ranks_names_the_slowest():
    found = typical_iteration(timeline(by_hand(ranks=3).events))
    forward = found.spread("forward")
    assert forward.slowest == 2
    assert [forward.mean, forward.low, forward.high] == pytest.approx([0.027, 0.025, 0.029])


def test_one_rank_alone_keeps_the_skew_over_all():
    iterations = timeline(by_hand(ranks=3).events)
    found = typical_iteration(iterations, rank=1)
    assert list(found.ranks) == [1]
    assert found.exchanges[0].skew == pytest.approx(0.004)
    with pytest.raises(TraceError, match=r"rank 7 is not in the trace\. Ranks in it: 0, 1, 2"):
        typical_iteration(iterations, rank=7)


def test_simultaneous_exchanges_count_once():
    [iteration] = timeline(
        [
            Event("iteration", 0, 0, 0.0, 10.0),
            Event("backward", 0, 0, 0.0, 2.0),
            Event("allreduce1", 0, 0, 1.0, 6.0),
            Event("allreduce2", 0, 0, 4.0, 8.0),
        ]
    )
    found = breakdown(iteration)
    assert (found.parts.exposed, found.parts.tail, found.parts.other) == (6.0, 6.0, 2.0)
    assert [exchange.exposed for exchange in found.exchanges] == [4.0, 4.0]


def test_one_odd_iteration_is_ignored():
    spans = [Event("iteration", 0, step, 0.0, 1.0 if step else 50.0) for step in range(3)]
    assert typical_iteration(timeline(spans)).spread("iteration") == Spread(1.0, 1.0, 1.0, 0)


def test_an_unfinished_step_is_left_out_and_no_step_at_all_is_an_error():
    whole = Event("iteration", 0, 1, 0.0, 1.0)
    unfinished = Event("forward", 0, 2, 1.0, 2.0)
    assert [i.step for i in timeline([whole, unfinished])] == [1]
    with pytest.raises(TraceError, match=r"no iteration \(1 other events\)"):
        timeline([unfinished])


def test_parts_add_up_to_the_iteration() -> None:
    events = [
        span
        for step, (forward, wait) in enumerate([(1.0, 5.0), (3.0, 1.0), (2.0, 3.0), (4.0, 4.0)])
        for span in (
            Event("iteration", 0, step, 0.0, 10.0 + forward),
            Event("forward", 0, step, 0.0, forward),
            Event("data_wait", 0, step, forward, forward + wait),
        )
    ]
    for shown in (events, by_hand(3, 4).events):
        typical = typical_iteration(timeline(shown))
        parts = {name: typical.spread(name).mean for name in PARTS if name != "tail"}
        assert parts.pop("iteration") == pytest.approx(sum(parts.values()))
