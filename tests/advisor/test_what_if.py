"""What stands for a network that was not measured: a line through the exchanges of a trace."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from slipstream.advisor.trace_stats import trace_stats
from slipstream.advisor.what_if import fitted_line, time_shares
from slipstream.trace.intervals import length, union
from tests.harness.traces import many
from tests.harness.training import Training


@many
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)))
def test_shares_sum_to_the_time_in_which_anything_ran(spans):
    shares = time_shares(spans)
    assert sum(shares) == pytest.approx(length(union(spans)))
    assert all(0 <= h <= end - start for h, (start, end) in zip(shares, spans, strict=True))


@pytest.mark.parametrize(
    ("sizes", "seconds", "at", "expected"),
    [
        ([1, 2, 3], [5, 7, 9], 10, 23.0),
        ([4, 4], [2, 4], 8, 6.0),  # one size does not tell the startup
        ([1, 3], [1, 5], 10, 15.0),  # a line would start below zero
        ([1, 3], [5, 1], 10, 3.0),  # or fall
        ([0, 0], [2, 4], 10, 3.0),
    ],
)
def test_startup_and_slope_of_the_fitted_line_are_not_negative(sizes, seconds, at, expected):
    startup, per_byte = fitted_line(sizes, seconds)
    assert startup + per_byte * at == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["flat", "direct", "sharded"])
def test_the_line_stands_for_what_the_transport_of_the_trace_costs(kind: str) -> None:
    training = Training(startup=10.0, per_mb=8.0)
    trace = training.trace
    trace.meta["strategy"]["gradients"]["transport"] = kind
    stats = trace_stats(trace)
    assert stats.what_if is not None, stats.unpredicted
    assert stats.what_if.base.strategy.gradients.transport.kind == kind


def test_what_several_stages_cost_no_trace_tells() -> None:
    trace = Training().trace
    trace.meta["strategy"]["gradients"]["transport"] = "hierarchical"
    stats = trace_stats(trace)
    assert stats.what_if is None
    assert "doctor network" in stats.unpredicted


def test_the_bytes_of_the_traced_codec_are_those_of_its_segments() -> None:
    trace = Training(startup=10.0, per_mb=8.0).trace
    trace.meta["strategy"]["gradients"]["codec"] = "int8"
    for segment in trace.meta["segments"]:
        segment["wire_bytes"] = segment["bytes"] // 4
    stats = trace_stats(trace)
    assert stats.what_if is not None, stats.unpredicted
    assert stats.what_if.forecast.network.codecs["int8"].ratio == pytest.approx(0.25)
