"""The dynamic program finds the best plan there is, and predicts its costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from math import isqrt

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import StrategyError
from slipstream.memory.recompute.budget import (
    BlockCost,
    Region,
    RegionParts,
    cheapest,
    peak_bytes,
    seconds,
    segments,
)


def least_bytes(costs: list[BlockCost], borders: Collection[int] = ()) -> int:
    """The least budget that the error of one below it names."""
    if not any(cost.saved for cost in costs):
        return 0
    with pytest.raises(StrategyError) as caught:
        cheapest(costs, -1, borders)
    return int(str(caught.value).split("at least ")[1].split()[0])


costs_of_a_block = st.builds(
    BlockCost,
    forward=st.integers(1, 9).map(float),
    backward=st.integers(1, 9).map(float),
    output=st.integers(0, 5),
    saved=st.integers(0, 20),
)
chains = st.lists(costs_of_a_block, min_size=1, max_size=4)


@cache
def every_plan(first: int, end: int) -> tuple[RegionParts, ...]:
    """All plans of blocks ``first`` to ``end - 1``: a region may hold any plan but itself."""
    return tuple(_plans(first, end, whole=True))


def _plans(first: int, end: int, *, whole: bool) -> Iterator[RegionParts]:
    if first == end:
        yield ()
        return
    for after in every_plan(first + 1, end):
        yield (first, *after)
    for stop in range(first + 1, end + (1 if whole else 0)):
        for inner in _plans(first, stop, whole=False):
            for after in every_plan(stop, end):
                yield (Region(inner), *after)


def crosses(parts: RegionParts, borders: set[int]) -> bool:
    return any(
        isinstance(part, Region) and bool(borders.intersection(part.blocks[1:])) for part in parts
    )


def test_all_plans_of_small_chains_are_tried() -> None:
    assert set(every_plan(0, 1)) == {(0,), (Region((0,)),)}
    assert (Region((Region((0,)), 1)), 2) in every_plan(0, 3)
    assert (0, Region((Region((1, 2)), 3))) in every_plan(0, 4)
    assert len(every_plan(0, 4)) == len(set(every_plan(0, 4))) > 50


@settings(deadline=None, max_examples=150)
@given(chains, st.integers(0, 80), st.sets(st.integers(1, 3)))
def test_nothing_that_fits_is_faster(costs: list[BlockCost], limit: int, borders: set[int]) -> None:
    plans = [plan for plan in every_plan(0, len(costs)) if not crosses(plan, borders)]
    least = min(peak_bytes(plan, costs) for plan in plans)
    assert least_bytes(costs, borders) == least
    if limit < least:
        with pytest.raises(StrategyError, match=rf"budget of {limit} .* at least {least} "):
            cheapest(costs, limit, borders)
        return
    found = cheapest(costs, limit, borders)
    assert not crosses(found, borders)
    assert [n for part in found for n in numbers(part)] == list(range(len(costs)))
    assert peak_bytes(found, costs) <= limit
    fits = [plan for plan in plans if peak_bytes(plan, costs) <= limit]
    assert seconds(found, costs) == min(seconds(plan, costs) for plan in fits)


def numbers(part: int | Region) -> tuple[int, ...]:
    return part.blocks if isinstance(part, Region) else (part,)


many = st.lists(
    st.builds(
        BlockCost,
        forward=st.floats(0.01, 1),
        backward=st.floats(0.01, 1),
        output=st.integers(10**5, 10**6),
        saved=st.integers(10**6, 10**8),
    ),
    min_size=1,
    max_size=24,
)


@settings(deadline=None, max_examples=25)
@given(many, st.integers(1, 6), st.sets(st.integers(1, 23), max_size=3))
def test_rounded_plans_fit_and_are_no_slower_than_uniform_ones(
    costs: list[BlockCost], length: int, borders: set[int]
) -> None:
    for every in (length, max(1, isqrt(len(costs)))):
        plan = segments(len(costs), every, borders)
        limit = peak_bytes(plan, costs)
        found = cheapest(costs, limit, borders)
        assert peak_bytes(found, costs) <= limit
        assert seconds(found, costs) <= seconds(plan, costs) + 1e-9


def test_the_least_budget_is_enough_however_it_is_rounded() -> None:
    costs = [BlockCost(0.1, 0.2, output=7 * i + 1, saved=1000 * i + 3) for i in range(1, 20)]
    least = least_bytes(costs)
    assert peak_bytes(cheapest(costs, least, slots=10), costs) == least
    with pytest.raises(StrategyError):
        cheapest(costs, least - 1)


def test_regions_nest_deeply_if_memory_is_scarce() -> None:
    costs = [BlockCost(1.0, 2.0, output=10, saved=100)] * 12
    plan = cheapest(costs, least_bytes(costs))
    extra = seconds(plan, costs) - seconds(tuple(range(12)), costs)
    assert extra > 12  # some run more than twice
    assert peak_bytes(plan, costs) < peak_bytes(segments(12, 1), costs)


@pytest.mark.parametrize(
    ("output", "saved"), [(2**20, 2**20 * 30 + 2**14), (2**20 - 3, 2**20 * 30 + 7)]
)
def test_a_plan_is_found_that_just_fits(output: int, saved: int) -> None:
    """With a common measure of all sizes, and where they must be rounded."""
    costs = [BlockCost(1.0, 2.0, output, saved)] * 6
    limit = peak_bytes(segments(6, 1), costs)
    assert cheapest(costs, limit) == (*segments(5, 1), 5)
