"""The exchanges of the typical iteration: when gradients are ready, and when exchanges run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.advisor.exchanges import Exchanges
from slipstream.advisor.trace_stats import trace_stats
from slipstream.trace.event import Trace
from tests.harness.training import MS, Training


def _of(training: Training, trace: Trace | None = None) -> Exchanges:
    found = trace_stats(trace or training.trace, training.network).exchanges
    assert found is not None
    return found


def test_times_are_those_of_the_last_rank():
    found = _of(Training(ranks=3, late=lambda rank, step: 4.0 * rank))
    assert found.cuts == (5, 10)
    assert found.num_bytes == (5_000_000, 5_000_000)
    assert [second / MS for span in found.spans for second in span] == pytest.approx(
        [58, 108, 108, 158]
    )
    assert found.backward == pytest.approx(108 * MS)
    assert (found.skew, found.lag) == pytest.approx((8 * MS, 4 * MS))
    assert (found.tail, found.busy) == pytest.approx((50 * MS, 100 * MS))
    assert found.ready == pytest.approx([(18 + 10 * index) * MS for index in range(10)])


def test_a_gradient_without_a_value_is_ready_when_backward_ends():
    offsets = (None, *Training().offsets[1:])
    found = _of(Training(offsets=offsets))
    assert found.ready == pytest.approx([100 * MS] * 10)
    assert found.spans[0] == pytest.approx((100 * MS, 150 * MS))


def test_unknown_ready_times_are_interpolated_by_bytes_between_full_segments():
    training = Training(cuts=(2, 4), sizes=(3, 1, 0, 0), offsets=(10, 20, 30, 60))
    trace = training.trace
    bare = [replace(e, args={}) if e.name == "backward" else e for e in trace.events]
    found = _of(training, Trace(tuple(bare), trace.meta))
    assert found.ready == pytest.approx([15 * MS, 20 * MS, 60 * MS, 60 * MS])


def test_idle_is_time_in_which_gradients_wait_and_no_exchange_runs():
    # The first gradient waits from 10 to 30, then 3 MB take until 36; the next one waits from 40.
    found = _of(Training(cuts=(3, 10), startup=0, per_mb=2))
    assert found.idle == pytest.approx((20 + 60) * MS)


def test_buckets_of_several_dtypes_are_one_segment():
    trace = Training().trace
    events = []
    for event in trace.events:
        events.append(event)
        if event.name == "allreduce1":
            more = {**event.args, "bytes": 7}
            events.append(replace(event, end=event.end + 1 * MS, args=more))
    found = _of(Training(), Trace(tuple(events), trace.meta))
    assert found.num_bytes == (5_000_007, 5_000_000)
    assert found.spans[0][1] == pytest.approx(101 * MS)
    assert found.cuts == (5, 10)


def test_of_an_accumulation_window_the_last_backward_counts():
    trace = Training().trace
    earlier = [
        replace(event, start=event.start - 45 * MS, end=event.start - 40 * MS, args={})
        for event in trace.events
        if event.name == "backward"
    ]
    found = _of(Training(), Trace((*earlier, *trace.events), trace.meta))
    assert found == _of(Training())
