"""Who is slow, and in what: persistently, not once."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from hypothesis import given, strategies as st

from slipstream.analysis.stragglers import median_of_others, stragglers
from slipstream.trace.timeline import timeline
from tests.harness.traces import many
from tests.harness.training import MS, Training


def _found(clock_error: float = 0.0, **settings: Any) -> list[tuple[int, str, int, int]]:
    iterations = timeline(Training(**{"ranks": 4, "steps": 5} | settings).trace.events)
    return [(s.rank, s.phase, s.iterations, s.of) for s in stragglers(iterations, clock_error)]


@pytest.mark.parametrize("phase", ["data_wait", "forward", "backward", "optimizer"])
def test_rank_and_phase_are_named(phase):
    assert _found(late=lambda rank, step: 20.0 * (rank == 2), phase=phase) == [(2, phase, 5, 5)]


def test_numbers_of_a_straggler():
    late = Training(ranks=4, late=lambda rank, step: 20.0 * (rank == 2))
    [slow] = stragglers(timeline(late.trace.events))
    assert (slow.seconds, slow.usual) == pytest.approx((20 * MS, 50 * MS))


def test_odd_iterations_make_no_straggler():
    assert not _found(late=lambda rank, step: 90.0 * (rank == 2 and step in (2, 4)))
    most = _found(late=lambda rank, step: 90.0 * (rank == 2 and step in (2, 4, 6)))
    assert most == [(2, "forward", 3, 5)]


@pytest.mark.parametrize(
    ("late", "settings", "found"),
    [
        (2.6, {}, True),  # of 50 ms of forward, and of 213 ms of iteration
        (2.4, {}, False),  # less than 5 % of forward
        (2.6, {"optimizer": 100.0}, False),  # less than 1 % of the iteration
        (2.6, {"clock_error": 2.7 * MS}, False),
    ],
)
def test_the_bounds(late, settings, found):
    assert bool(_found(late=lambda rank, step: late * (rank == 1), **settings)) is found


def test_the_worst_comes_first():
    found = _found(late=lambda rank, step: {1: 20.0, 3: 30.0}.get(rank, 0.0))
    assert [rank for rank, *_ in found] == [3, 1]


def test_one_rank_is_no_straggler():
    assert not _found(ranks=1)


@many
@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_the_median_of_the_others_leaves_one_out(values):
    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        assert median_of_others(sorted(values), value) == median(others)
