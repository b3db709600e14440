"""A change for good is found; noise, bursts, pauses, drift and a network that goes up and down do
not make a training search again and again."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.replan import SEARCH, searches
from slipstream.tuner.change import (
    CHANGE,
    MOST_PATIENCE,
    UPDATES,
    Change,
    ChangeDetector,
    UpdateTimes,
)
from slipstream.tuner.speed_watch import BLOCK

LONG = 1.0
"""Seconds of an update from which on the number of updates decides, not their seconds."""


def noisy(chance: random.Random, sigma: float) -> float:
    """A factor: most near 1, some far above."""
    return math.exp(chance.gauss(0, sigma)) * (
        chance.uniform(2, 20) if chance.random() < 0.05 else 1
    )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.0, 0.25),
    st.floats(2.0, 30.0),
    st.booleans(),
    st.integers(2 * UPDATES, 300),
)
def test_a_change_for_good_is_found_soon_and_once(
    seed: int, sigma: float, factor: float, faster: bool, at: int
) -> None:
    chance = random.Random(seed)
    level = 1 / factor if faster else factor
    seconds = [40 * noisy(chance, sigma) * (level if n >= at else 1) for n in range(at + 600)]
    (found,) = searches(seconds)
    assert at < found <= at + UPDATES + 3 * BLOCK


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(0.0, 0.5), st.floats(0.0, 0.12), st.integers(0, UPDATES // 2)
)
def test_noise_bursts_and_drift_are_no_change(
    seed: int, sigma: float, swing: float, burst: int
) -> None:
    chance = random.Random(seed)

    def update(number: int) -> float:
        day = 1 + swing * math.sin(number / 400)
        slow = 10 if number > 200 and number % 250 < burst else 1  # for a moment
        return LONG * day * slow * noisy(chance, sigma)

    assert searches(map(update, range(1500))) == []


@settings(max_examples=20, deadline=None)
@given(st.integers(BLOCK, 5000), st.floats(1.5, 10.0), st.floats(0.1, 0.9))
def test_a_network_that_goes_up_and_down_costs_little(
    period: int, factor: float, part: float
) -> None:
    updates = 10_000
    seconds = (LONG * (factor if n % period < part * period else 1) for n in range(updates))
    assert len(searches(seconds)) * SEARCH <= updates / 10


def test_short_updates_must_last_for_seconds() -> None:
    blocks = [[0.01] * BLOCK] * 400 + [[0.05] * BLOCK] * 30 + [[0.01] * BLOCK] * 100
    assert searches(second for block in blocks for second in block) == []  # 24 seconds of it


@pytest.mark.parametrize(("factor", "found"), [(CHANGE * 1.01, True), (CHANGE * 0.99, False)])
def test_the_bound(factor: float, found: bool) -> None:
    assert bool(searches([LONG] * 128 + [factor * LONG] * 128)) == found


def test_noise_that_overlaps_is_no_change_however_much_it_moves() -> None:
    ones, others = [1.0, 3.0] * 8, [3.0, 1.0, 3.0, 3.0] * 4  # medians 2 and 3
    assert UpdateTimes.of(others, others).middle >= CHANGE * UpdateTimes.of(ones, ones).middle
    assert searches(ones * 8 + others * 20) == []


def test_patience_doubles_to_a_bound_and_comes_back_in_calm() -> None:
    detector, patience = ChangeDetector(), [1]
    for number in range(7):
        searches([LONG if number % 2 else 10.0] * (4 * detector.patience * UPDATES), detector)
        patience.append(detector.patience)
    assert patience == sorted(patience)
    assert patience[-1] == MOST_PATIENCE
    searches([10.0] * (11 * MOST_PATIENCE * UPDATES), detector)
    assert detector.patience == MOST_PATIENCE // 2


def test_a_state_goes_on() -> None:
    one, other = ChangeDetector(), ChangeDetector()
    searches([LONG] * UPDATES, one)
    other.load(one.state())
    assert other.before == one.before
    assert searches([LONG / 3] * UPDATES * 2, other) == [UPDATES + 2 * BLOCK]  # 30 seconds
    other.load(None)
    assert (other.before, other.patience) == (None, 1)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (UpdateTimes(3.9, 4.0, 4.1, 3.6), "the exchange has changed"),
        (UpdateTimes(3.9, 4.0, 4.1, 0.1), "computing has changed"),
    ],
)
def test_words_say_where_most_of_it_is(after: UpdateTimes, words: str) -> None:
    text = str(Change(UpdateTimes(0.9, 1.0, 1.1, 0.1), after, 64))
    assert text.endswith(words)
    assert "took 4.000 s instead of 1.000 s" in text
