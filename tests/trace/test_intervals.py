"""Interval arithmetic against sets of points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from slipstream.trace.intervals import lanes, length, subtract, touching, union
from tests.harness.traces import many

_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


def _points(intervals) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


@many
@given(_spans, _spans)
def test_union_difference_and_length_are_those_of_sets(a, b):
    assert _points(union(a)) == _points(a)
    assert _points(subtract(union(a), union(b))) == _points(a) - _points(b)
    assert length(union(a)) == len(_points(a))
    for result in (union(a), subtract(union(a), union(b))):
        assert all(start < end for start, end in result)
        assert all(x[1] <= y[0] for x, y in pairwise(result))


@many
@given(_spans, st.integers(0, 30), st.integers(1, 10))
def test_touching_finds_those_that_share_points(spans, start, width):
    end = start + width
    found = [(low, high) for low, high in union(spans) if low < end and start < high]
    assert list(touching(union(spans), start, end)) == found


@many
@given(_spans.map(lambda spans: [span for span in spans if span[0] < span[1]]))
def test_lanes_keep_spans_apart_and_are_as_few_as_possible(spans):
    chosen = lanes(spans)
    for lane in set(chosen):
        inside = [span for span, at in zip(spans, chosen, strict=True) if at == lane]
        assert sum(end - start for start, end in inside) == len(_points(inside))
    busiest = max((sum(s <= p < e for s, e in spans) for p in range(31)), default=0)
    assert len(set(chosen)) == busiest
