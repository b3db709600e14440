"""The split model against all splits, and the cost that is fitted to a trace."""

from __future__ import annotations

from itertools import accumulate, combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from slipstream.advisor.exchanges import TOLERANCE
from slipstream.advisor.split_model import SplitModel, fitted_line, time_shares
from slipstream.trace.intervals import length, union
from tests.harness.traces import many

GRADIENTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=8)
COSTS = st.lists(st.integers(0, 40), min_size=241, max_size=241)  # any function of the bytes


def _model(gradients: list[tuple[int, int]], costs: list[int]) -> SplitModel:
    ready, sizes = zip(*gradients, strict=True)
    table = np.array(costs, dtype=float)
    return SplitModel(
        tuple(accumulate(ready, max)), sizes, lambda size: table[np.asarray(size, dtype=int)]
    )


def _all_cuts(n: int, count: int) -> list[tuple[int, ...]]:
    return [(*inner, n) for inner in combinations(range(1, n), count - 1)]


@many
@given(GRADIENTS, COSTS)
def test_exchanges_take_their_cost_one_after_the_other(gradients, costs):
    model = _model(gradients, costs)
    ready, sizes = model.ready, [size for _, size in gradients]
    for count in range(1, len(gradients) + 1):
        for cuts in _all_cuts(len(gradients), count):
            end = start = 0
            for cut in cuts:
                end = max(end, ready[cut - 1]) + costs[sum(sizes[start:cut])]
                start = cut
            assert model.finish(cuts) == end
            assert model.seconds(model.sizes_of(cuts)) == sum(
                costs[size] for size in model.sizes_of(cuts)
            )


@many
@given(GRADIENTS, COSTS, st.integers(1, 8))
def test_no_split_of_so_many_segments_ends_sooner(gradients, costs, most):
    model, n = _model(gradients, costs), len(gradients)
    best = [min(map(model.finish, _all_cuts(n, count))) for count in range(1, min(most, n) + 1)]
    assert model.finish(model.best_cuts(most)) == pytest.approx(min(best))
    enough = [end <= (1 + TOLERANCE) * min(best) for end in best]
    assert len(model.best_cuts(most, TOLERANCE)) == enough.index(True) + 1  # and no more segments


def test_of_thousands_of_gradients_some_positions_are_tried():
    n = 2000
    sizes = [1 + index % 7 for index in range(n)]
    ready = [(index + 1) / n for index in range(n)]
    model = SplitModel(ready, sizes, lambda size: 0.01 + 1.2 * size / sum(sizes))
    best = model.best_cuts(tolerance=TOLERANCE)
    assert best[-1] == n
    # 1.2 s of network bound it; each startup and the wait for the first gradient come on top.
    assert 1.21 < model.finish(best) < 1.21 + 0.01 * len(best) + 0.1
    assert SplitModel(ready, [0] * n, lambda size: 0.0 * size).best_cuts() == (n,)


def test_a_hundred_gradients_are_split_near_the_bound_of_the_network():
    ready = [0.1 * (index + 1) for index in range(100)]
    model = SplitModel(ready, [1] * 100, lambda size: 0.05 + 0.2 * size)
    best = model.best_cuts(tolerance=TOLERANCE)
    assert 20.1 < model.finish(best) < 20.6  # 0.1 s until the first is ready, then 20 s of network
    assert len(best) < 8


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
    assert fitted_line(sizes, seconds)(at) == pytest.approx(expected)
