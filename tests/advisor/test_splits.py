"""The model of one queue, against the plain recursion and against all splits there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.advisor.splits import ENOUGH, Queue, by_index, fit, shares
from slipstream.trace.intervals import length, union
from tests.trace.traces import many

GRADIENTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=8)
COSTS = st.lists(st.integers(0, 40), min_size=241, max_size=241)  # any function of the bytes


def _queue(gradients, costs) -> Queue:
    ready, sizes = zip(*gradients, strict=True)
    return Queue.of(ready, sizes, lambda size: float(costs[int(size)]))


def _plainly(gradients, costs, cuts) -> float:
    end = 0.0
    for a, b in pairwise((0, *cuts)):
        ready, sizes = zip(*gradients[a:b], strict=True)
        end = max(end, *ready) + costs[sum(sizes)]
    return end


def _all_cuts(n: int, count: int):
    return [(*inner, n) for inner in combinations(range(1, n), count - 1)]


@many
@given(GRADIENTS, COSTS)
def test_finish_is_the_recursion_whatever_the_order_of_ready_times(gradients, costs):
    queue = _queue(gradients, costs)
    for count in range(1, len(gradients) + 1):
        for cuts in _all_cuts(len(gradients), count):
            assert queue.finish(cuts) == _plainly(gradients, costs, cuts)
            assert queue.total(cuts) == sum(costs[size] for size in queue.sizes_of(cuts))


@many
@given(GRADIENTS, COSTS)
def test_each_split_is_the_best_of_its_number_of_segments(gradients, costs):
    queue, n = _queue(gradients, costs), len(gradients)
    found = queue.splits()
    best = [min(map(queue.finish, _all_cuts(n, count))) for count in range(1, n + 1)]
    assert [len(cuts) for cuts in found] == list(range(1, len(found) + 1))
    assert [queue.finish(cuts) for cuts in found] == best[: len(found)]
    enough = [end <= (1 + ENOUGH) * min(best) for end in best]
    assert len(found) == enough.index(True) + 1  # as good as any, and no more segments
    assert queue.splits(most=1) == found[:1]


def test_of_many_gradients_some_borders_are_tried():
    n = 2000
    sizes = [1 + index % 7 for index in range(n)]
    ready = [(index + 1) / n for index in range(n)]
    queue = Queue.of(ready, sizes, lambda size: 0.01 + 1.2 * size / sum(sizes))
    best = queue.splits()[-1]
    assert best[-1] == n
    # 1.2 s of network cannot end before; each startup and what the first waits for come on top.
    assert 1.21 < queue.finish(best) < 1.21 + 0.01 * len(best) + 0.1
    assert len(Queue.of(ready, [0] * n, lambda size: 0.0).splits()[0]) == 1


def test_a_hundred_gradients_are_split_near_the_bound_of_the_network():
    ready = [0.1 * (index + 1) for index in range(100)]
    queue = Queue.of(ready, [1] * 100, lambda size: 0.05 + 0.2 * size)
    best = queue.splits()[-1]
    assert 20.1 < queue.finish(best) < 20.6  # 0.1 s till the first is there, then 20 s of network
    assert len(best) < 8


@many
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)))
def test_shares_sum_to_the_time_in_which_anything_ran(spans):
    had = shares(spans)
    assert sum(had) == pytest.approx(length(union(spans)))
    assert all(0 <= h <= end - start for h, (start, end) in zip(had, spans, strict=True))


@pytest.mark.parametrize(
    ("sizes", "seconds", "at", "expected"),
    [
        ([1, 2, 3], [5, 7, 9], 10, 23.0),
        ([4, 4], [2, 4], 8, 6.0),  # one size tells no startup
        ([1, 3], [1, 5], 10, 15.0),  # a line would start below zero
        ([1, 3], [5, 1], 10, 3.0),  # or fall
        ([0, 0], [2, 4], 10, 3.0),
    ],
)
def test_the_fitted_line_starts_and_grows_no_lower_than_zero(sizes, seconds, at, expected):
    assert fit(sizes, seconds)(at) == pytest.approx(expected)


def test_a_patch_names_the_last_gradient_of_each_segment():
    assert by_index((1, 4))["gradients"]["split"]["last"] == [0, 3]
