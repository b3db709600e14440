"""Optimal cuts of the second phase against brute force, and against the closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from slipstream.planner.search.gather_split import forward_end, optimal_gather_cuts
from tests.planner.every_cut import all_cuts

CLOSE = 1e-9


@st.composite
def instances(draw):
    """Forward times, sizes, the cost of an all-gather, a tolerance."""
    count = draw(st.integers(1, 8))
    numbers = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    cost = draw(st.sampled_from([(2.0, 0.5), (0.0, 1.0), (5.0, 0.0), (0.0, 0.0), (0.1, 2.0)]))
    tolerance = draw(st.sampled_from([0.0, 0.0, 0.005, 0.2]))
    return draw(numbers), draw(numbers), cost, tolerance


@settings(deadline=None, max_examples=200)
@given(instances())
def test_no_cuts_let_forward_end_earlier_or_as_early_with_fewer_segments(instance) -> None:
    forward, sizes, cost, tolerance = instance
    allowed = all_cuts(len(forward))
    ends = [(len(cuts), forward_end(cuts, forward, sizes, *cost)) for cuts in allowed]
    best = min(end for _, end in ends)
    limit = best * (1 + tolerance) + CLOSE
    cuts = optimal_gather_cuts(forward, sizes, *cost, tolerance=tolerance)
    assert cuts in allowed
    assert forward_end(cuts, forward, sizes, *cost) <= limit
    assert len(cuts) == min(segments for segments, end in ends if end <= limit)


@given(instances())
def test_the_end_is_the_latest_gather_and_the_forward_behind_it(instance) -> None:
    forward, sizes, (startup, per_byte), _ = instance
    for cuts in all_cuts(len(forward)):
        starts = (0, *cuts[:-1])
        closed = max(
            number * startup + per_byte * sum(sizes[:stop]) + sum(forward[start:])
            for number, (start, stop) in enumerate(zip(starts, cuts, strict=True), start=1)
        )
        end = forward_end(cuts, forward, sizes, startup, per_byte)
        assert end == pytest.approx(closed)


def test_two_thousand_layers() -> None:
    random = np.random.default_rng(0)
    forward, sizes = random.random(2000) * 1e-4, random.random(2000) * 1e5
    cuts = optimal_gather_cuts(forward, sizes, 2e-3, 1.2e-8)
    single = forward_end((2000,), forward, sizes, 2e-3, 1.2e-8)
    assert forward_end(cuts, forward, sizes, 2e-3, 1.2e-8) < single


def test_nothing_to_cut() -> None:
    assert optimal_gather_cuts([], [], 1.0, 1.0) == ()
