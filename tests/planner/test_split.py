"""Optimal cuts against brute force and a lower bound; the local search around cuts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from slipstream.planner.search.split import finish_time, improve, optimal_cuts
from tests.planner.every_cut import all_cuts

CLOSE = 1e-9
MB = 2**20


def brute_force(ready, sizes, cost, borders):
    """The fewest segments that end as early as the best, and that best end."""
    count = len(ready)
    costs, latest = {}, {}
    for i, j in combinations(range(count + 1), 2):
        size = sum(sizes[i:j])
        costs[i, j] = float(cost(np.array([float(size)]))[0])
        latest[i, j] = max(ready[i:j])
        if any(i < border < j for border in borders):
            costs[i, j] = inf
    ends = []
    for cuts in all_cuts(count):
        end = 0.0
        for segment in pairwise((0, *cuts)):
            end = max(end, latest[segment]) + costs[segment]
        ends.append((len(cuts), end))
    best = min(end for _, end in ends)
    return min(m for m, end in ends if end <= best + CLOSE), best


def lower_bound(ready, sizes, startup: float, per_byte: float) -> float:
    """No cuts end before this where an exchange costs ``startup + per_byte * bytes``.

    Gradient ``k`` and all behind it must be sent after ``k`` is ready:
    ``startup + max over k of max(0, ready_k) + per_byte * bytes of gradients k .. n``.
    """
    from_here = np.cumsum(np.asarray(sizes, dtype=np.float64)[::-1])[::-1]
    starts = np.maximum(np.asarray(ready, dtype=np.float64), 0.0)
    return startup + float(np.max(starts + per_byte * from_here))


def affine(startup: float, per_byte: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda size: startup + per_byte * size


def piecewise(size):
    """Falls where another algorithm takes over, as measured costs do."""
    return np.where(size < 12, 3.0 + 0.4 * size, 2.0 + 0.3 * size)


numbers = st.integers(0, 12).map(float)


@st.composite
def instances(draw):
    """Ready times that need not ascend, sizes, any cost, borders."""
    count = draw(st.integers(1, 8))
    ready = draw(st.lists(numbers, min_size=count, max_size=count))
    if draw(st.booleans()):
        ready.sort()
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    table = np.random.default_rng(draw(st.integers(0, 2**16))).integers(0, 13, sum(sizes) + 1)
    cost = draw(
        st.sampled_from(
            [
                affine(2.0, 0.5),
                affine(0.0, 1.0),
                affine(5.0, 0.0),
                np.sqrt,
                piecewise,
                lambda size: table[np.asarray(size, dtype=int)].astype(float),
            ]
        )
    )
    return ready, sizes, cost, draw(st.lists(st.integers(1, count), max_size=2))


@settings(deadline=None, max_examples=200)
@given(instances())
def test_no_cuts_end_earlier_or_as_early_with_fewer_segments(instance) -> None:
    ready, sizes, cost, borders = instance
    count, best = brute_force(ready, sizes, cost, borders)
    cuts = optimal_cuts(ready, sizes, cost, borders=borders)
    end = finish_time(cuts, ready, sizes, cost)
    assert end <= best + CLOSE
    assert len(cuts) == count
    assert set(borders) - {len(ready)} <= set(cuts)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(numbers, st.integers(0, 9)), min_size=1, max_size=60),
    st.floats(0, 5),
    st.floats(0, 2),
)
def test_the_end_lies_between_the_lower_bound_and_one_single_exchange(rows, startup, rate) -> None:
    ready, sizes = zip(*rows, strict=True)
    cost = affine(startup, rate)
    end = finish_time(optimal_cuts(ready, sizes, cost), ready, sizes, cost)
    assert end >= lower_bound(ready, sizes, startup, rate) - CLOSE
    assert end <= finish_time((len(rows),), ready, sizes, cost) + CLOSE


def test_the_lower_bound_is_reached_where_one_exchange_is_the_optimum() -> None:
    ready, sizes = [3.0, 1.0], [10, 10]
    assert lower_bound(ready, sizes, 4.0, 0.1) == 3.0 + 4.0 + 2.0
    assert optimal_cuts(ready, sizes, affine(4.0, 0.1)) == (2,)


CASES = {
    "no gradients": ([], [], affine(1.0, 1.0), (), ()),
    "one gradient": ([2.0], [7], affine(1.0, 1.0), (), (1,)),
    "free exchanges are one": ([1.0, 2.0, 3.0], [1, 1, 1], affine(0.0, 0.0), (), (3,)),
    "nothing hides a startup": ([0.0, 0.0, 0.0], [1, 1, 1], affine(1.0, 1.0), (), (3,)),
    "a small last one": ([1.0, 50.0, 60.0], [30, 9, 1], affine(1.0, 1.0), (), (1, 2, 3)),
    "a border": ([0.0, 0.0, 0.0], [1, 1, 1], affine(1.0, 1.0), (1,), (1, 3)),
}


@pytest.mark.parametrize(("ready", "sizes", "cost", "borders", "cuts"), CASES.values(), ids=CASES)
def test_cases_known_by_hand(ready, sizes, cost, borders, cuts) -> None:
    assert optimal_cuts(ready, sizes, cost, borders=borders) == cuts


@pytest.mark.parametrize("startup", [1e-3, 1e-6, 0.0])
def test_thousands_of_gradients_against_all_fixed_sizes(startup) -> None:
    random = np.random.default_rng(7)
    count = 2000
    sizes = (random.pareto(0.8, count) * 3e4).astype(int) + 256
    ready = np.cumsum(random.exponential(1e-4, count))
    cost = affine(startup, 1e-9)
    cuts = optimal_cuts(ready, sizes, cost)
    end = finish_time(cuts, ready, sizes, cost)
    assert end >= lower_bound(ready, sizes, startup, 1e-9) - CLOSE
    for limit in MB * 2.0 ** np.arange(-3, 8):
        fixed, filled = [], 0
        for index, size in enumerate(sizes, 1):
            filled += size
            if filled >= limit or index == count:
                fixed.append(index)
                filled = 0
        assert end <= finish_time(fixed, ready, sizes, cost) + CLOSE


@settings(deadline=None, max_examples=200)
@given(instances(), st.integers(1, 30))
def test_a_search_never_gets_worse_and_stays_within_its_evaluations(instance, evaluations) -> None:
    ready, sizes, cost, borders = instance
    count = len(ready)
    start = tuple(sorted({*borders, count}))
    asked = []

    def evaluate(cuts):
        asked.append(cuts)
        return finish_time(cuts, ready, sizes, cost)

    found = improve(start, evaluate, max_evaluations=evaluations)
    assert evaluate(found) <= evaluate(start) + CLOSE
    assert found[-1] == count
    assert len(asked) <= evaluations + 2
    assert len(set(asked)) >= len(asked) - 2


def test_a_search_without_limit_ends_where_no_single_step_helps() -> None:
    random = np.random.default_rng(3)
    ready, sizes = np.cumsum(random.random(40)), random.integers(1, 50, 40)
    cost = affine(1.0, 0.05)

    def evaluate(cuts):
        return finish_time(cuts, ready, sizes, cost)

    found = improve((40,), evaluate, max_evaluations=10**6)
    best = evaluate(optimal_cuts(ready, sizes, cost))
    assert evaluate((40,)) > evaluate(found) >= best - CLOSE
    assert evaluate(found) <= 1.1 * best
    near = [tuple(c for c in found if c != cut) for cut in found[:-1]]
    near += [tuple(sorted({*found, extra})) for extra in range(1, 40)]
    assert all(evaluate(cuts) >= evaluate(found) - CLOSE for cuts in near)
